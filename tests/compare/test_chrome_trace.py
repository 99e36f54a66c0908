"""The trace's file, checked against the Trace Event Format (Duffy and others, Google, 2016)."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest

from skyctl.compare.chrome_trace import MEASURED_PID, SIMULATED_PID, read_trace, trace_document

REQUIRED = {"X": {"dur", "name", "cat"}, "M": {"name", "args"}, "s": {"id", "name", "cat"}}
REQUIRED["f"] = REQUIRED["s"] | {"bp"}


@pytest.fixture
def document(traces: ModuleType) -> dict[str, Any]:
    return json.loads(json.dumps(trace_document(*traces.two_timelines(), run_id="r"), allow_nan=False))


def test_every_event_has_what_its_phase_needs(document: dict[str, Any]) -> None:
    assert document["displayTimeUnit"] in ("ms", "ns")
    for event in document["traceEvents"]:
        assert event.keys() >= {"ph", "pid", "tid", "ts"} | REQUIRED[event["ph"]]
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["ts"], int | float)
        assert event.get("dur", 0) >= 0


def test_processes_and_threads_are_named(document: dict[str, Any]) -> None:
    names = {
        (event["name"], event["pid"], event["tid"]): event["args"]
        for event in document["traceEvents"]
        if event["ph"] == "M"
    }
    assert names["process_name", MEASURED_PID, 0] == {"name": "measured"}
    assert names["process_name", SIMULATED_PID, 0] == {"name": "simulated"}
    for pid in (MEASURED_PID, SIMULATED_PID):
        assert names["thread_name", pid, 1] == {"name": "0 n1/cpu:0"}
        assert names["thread_name", pid, 2] == {"name": "1 n2/cpu:0"}
        assert names["thread_sort_index", pid, 2] == {"sort_index": 1}


def test_slices_of_a_thread_do_not_overlap(document: dict[str, Any]) -> None:
    by_thread = defaultdict(list)
    for event in document["traceEvents"]:
        if event["ph"] == "X":
            by_thread[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert len(by_thread) == 4
    for slices in by_thread.values():
        slices.sort()
        for (_, end), (start, _) in pairwise(slices):
            assert start >= end - 0.01


def test_arrows_join_the_slices_that_make_and_use_a_message(document: dict[str, Any]) -> None:
    slices = [event for event in document["traceEvents"] if event["ph"] == "X"]

    def at(event: dict[str, Any]) -> str:
        (name,) = (
            s["name"]
            for s in slices
            if (s["pid"], s["tid"]) == (event["pid"], event["tid"])
            and s["ts"] <= event["ts"] <= s["ts"] + s["dur"]
            and s["cat"] == "compute"
        )
        return name

    ends = defaultdict(dict)
    for event in document["traceEvents"]:
        if event["ph"] in "sf":
            ends[event["id"]][event["ph"]] = event
    assert Counter(pair["s"]["name"] for pair in ends.values()) == {"activation": 8, "gradient": 8}
    for pair in ends.values():
        assert pair["s"]["ts"] <= pair["f"]["ts"]
        assert at(pair["s"]) == at(pair["f"])
        assert pair["f"]["bp"] == "e"


def test_the_simulated_step_begins_with_a_typical_measured_one(
    document: dict[str, Any], traces: ModuleType
) -> None:
    line, _ = traces.two_timelines()
    starts = [e["ts"] for e in document["traceEvents"] if e["ph"] == "X" and e["pid"] == SIMULATED_PID]
    assert min(starts) == pytest.approx(line.typical().start_s * 1e6)
    assert document["otherData"]["simulated_beside_step"] == line.typical().number
    assert document["otherData"]["clock_error_s"] == {"n1/cpu:0": 0.0, "n2/cpu:0": 0.001}


def test_what_was_written_can_be_read(traces: ModuleType, document: dict[str, Any]) -> None:
    measured, _ = traces.two_timelines()
    again = read_trace(document)
    assert again.devices == measured.devices
    assert [step.number for step in again.steps] == [step.number for step in measured.steps]
    for was, now in zip(measured.steps, again.steps, strict=True):
        assert (now.start_s, now.end_s) == pytest.approx((was.start_s, was.end_s))
        assert [(b.stage, b.kind, b.microbatch) for b in now.spans] == [
            (b.stage, b.kind, b.microbatch) for b in was.spans
        ]
        for then, here in zip(was.spans, now.spans, strict=True):
            assert (here.start_s, here.end_s) == pytest.approx((then.start_s, then.end_s), abs=1e-8)
    with pytest.raises((ValueError, KeyError)):
        read_trace({"traceEvents": []})
