"""The spans that ranks record: in order, within their step, all of them, and not more than asked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.helpers.orders import with_fields
from tests.worker.sums import star

from skyctl.compare.timeline import measured_timeline
from skyctl.worker.trace.trace_recorder import IDLE, TRANSFER, TraceRecorder

Workloads = Callable[..., dict[str, Any]]


def test_spans_end_when_they_are_told_and_old_steps_go() -> None:
    now = [0.0]
    recorder = TraceRecorder(steps=2, clock=lambda: now[0])
    for step in range(4):
        recorder.begin(step)
        now[0] += 3.0
        recorder.record_wait(0, 2.0, 0.5)
        now[0] += 1.0
        recorder.record_action("F", 0, 1.0)
        now[0] += 0.25
        recorder.record_send(0)
        recorder.end()
        now[0] += 0.75
    document = recorder.document()
    assert [step["step"] for step in document["steps"]] == [2, 3]
    assert document["clocks"] == {}
    assert document["steps"][0] == {
        "step": 2,
        "start_s": 10.0,
        "end_s": 15.0,
        "spans": [
            (IDLE, 0, 10.5, 12.5),
            (TRANSFER, 0, 12.5, 13.0),
            ("F", 0, 13.0, 14.0),
            ("S", 0, 14.0, 14.25),
        ],
    }
    assert document["steps"][1]["end_s"] == 19.25  # the last step's end, and not the run's


def test_a_validation_is_no_part_of_a_step() -> None:
    now = [0.0]
    recorder = TraceRecorder(clock=lambda: now[0])
    for step in range(3):
        recorder.begin(step)
        now[0] += 1.0
        recorder.end()
        now[0] += 0.5  # reported
        if step != 1:
            recorder.end_step_early()
            now[0] += 10.0
    assert [(step["start_s"], step["end_s"]) for step in recorder.document()["steps"]] == [
        (0.0, 1.5),
        (11.5, 13.0),
        (13.0, 14.5),
    ]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero-bubble"])
def test_real_ranks(workload: Workloads, pool: Any, driver: ModuleType, schedule: str) -> None:
    outcome = pool.run(driver.orders(workload(), [0, 2, 5, 7], 4, schedule, 3, trace=True))
    assert not outcome.errors, outcome.errors
    documents = [json.loads(Path(outcome.results[rank]["trace"]).read_text()) for rank in range(3)]
    assert [sorted(document["clocks"]) for document in documents] == [[], ["end", "start"], ["end", "start"]]
    for rank, document in enumerate(documents):
        for step, event in zip(document["steps"], outcome.steps[rank], strict=True):
            assert step["step"] == event["step"]
            spans = step["spans"]
            done = [(kind, m) for kind, m, _, _ in spans if kind in "FBO"]
            assert sorted(done) == sorted([(k, m) for m in range(4) for k in "FB"] + [("O", 0)])
            assert ("W" in {kind for kind, *_ in spans}) == (schedule == "zero-bubble")
            ends = [step["start_s"]]
            for _, _, start_s, end_s in spans:
                assert start_s >= ends[-1] - 1e-6
                assert end_s >= start_s
                ends.append(end_s)
            assert ends[-1] <= step["end_s"]
            for kind, name in (("F", "forward_s"), ("BW", "backward_s"), ("O", "optimizer_s")):
                total_s = sum(end_s - start_s for k, _, start_s, end_s in spans if k in kind)
                assert total_s == pytest.approx(event[name])
            waited_s = sum(end_s - start_s for k, _, start_s, end_s in spans if k == IDLE)
            assert waited_s == pytest.approx(event["idle_s"], abs=1e-9)


def test_real_holders(workload: Workloads, pool: Any, driver: ModuleType) -> None:
    """Microbatches have their numbers in the step, sums have spans, clocks lead to the first."""
    orders = driver.side_by_side(workload(), 7, [1, 1, 2], star(3, root=2), 3, trace=True)
    clocks = zip((None, 2, 0), ([2], [], [1]), strict=True)
    orders = [
        with_fields(order, clock_of=of, clock_for=for_)
        for order, (of, for_) in zip(orders, clocks, strict=True)
    ]
    outcome = pool.run(orders)
    assert not outcome.errors, outcome.errors
    documents = [json.loads(Path(outcome.results[rank]["trace"]).read_text()) for rank in range(3)]
    assert [sorted(document["clocks"]) for document in documents] == [[], ["end", "start"], ["end", "start"]]
    line = measured_timeline(documents, ("a", "b", "c"), (None, 2, 0))
    near_s = 2 * max(line.errors_s) + 1e-5  # clocks' offsets at both ends of a short run say how fast they go
    for step, *events in zip(line.steps, *(outcome.steps[rank] for rank in range(3)), strict=True):
        done = [(s.stage, s.microbatch) for s in step.spans if s.kind == "F"]
        assert sorted(done) == [(0, 0), (1, 1), (2, 2), (2, 3)]
        sums = {s.stage: s for s in step.spans if s.kind == "R"}
        for rank, event in enumerate(events):
            assert sums[rank].seconds == pytest.approx(event["transfer_s"], rel=0.02, abs=near_s)
        last_s = max(s.end_s for s in step.spans if s.kind == "B")
        apart_s = 2 * max(line.errors_s) + 1e-3
        assert all(s.end_s > last_s - apart_s for s in sums.values()), "nobody's sum ends before the last one"


def test_without_being_asked_nothing_is_recorded(workload: Workloads, pool: Any, driver: ModuleType) -> None:
    outcome = pool.run(driver.orders(workload(), [0, 3, 7], 2, "1f1b", 2))
    assert {event["trace"] for event in outcome.results.values()} == {None}


def test_messages_that_were_waited_for_are_timed(workload: Workloads, pool: Any, driver: ModuleType) -> None:
    """A stage that got no processor may find all of a step's messages there: then it has waited for none."""
    outcome = pool.run(driver.orders(workload(), [0, 3, 7], 4, "sequential", 20))
    for rank, (timed, none) in enumerate(
        (("gradient_message_s", "input_message_s"), ("input_message_s", "gradient_message_s"))
    ):
        timed_events = [event for event in outcome.steps[rank] if event[timed] is not None]
        assert timed_events
        assert all(0 < event[timed] <= event["transfer_s"] for event in timed_events)
        assert all(event[none] is None for event in outcome.steps[rank])
