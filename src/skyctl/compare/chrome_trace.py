"""A trace for https://ui.perfetto.dev or chrome://tracing: the Trace Event Format, JSON object form.

Two processes: what was measured, and the simulated step, moved to the start of a typical measured one. A
thread is a stage, pipeline by pipeline; an arrow (flow event) is a message. Times are microseconds on the
first stage's clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from skyctl.compare.timeline import IDLE, KIND_LABELS, TRANSFER, Timeline, TimelineSpan, TimelineStep

MEASURED_PID = 1
SIMULATED_PID = 2

_COLOURS = {
    "F": "thread_state_running",
    "B": "rail_animation",
    "W": "cq_build_passed",
    "O": "detailed_memory_dump",
    "C": "detailed_memory_dump",
    "S": "vsync_highlight_color",
    "R": "vsync_highlight_color",
    IDLE: "grey",
    TRANSFER: "yellow",
}
"""Names from the trace viewer's own palette (``cname``); Perfetto chooses by name instead."""


def trace_document(measured: Timeline, simulated: Timeline, *, run_id: str) -> dict[str, Any]:
    """The file's content, ready for JSON."""
    typical = measured.typical()
    events = [
        *_names(MEASURED_PID, "measured", measured.devices),
        *_names(SIMULATED_PID, "simulated", simulated.devices),
    ]
    flow = 0
    for step in measured.steps:
        step_events = _step(MEASURED_PID, step, 0.0, flow)
        flow += sum(event["ph"] == "s" for event in step_events)
        events += step_events
    events += _step(SIMULATED_PID, simulated.steps[0], typical.start_s, flow)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "run_id": run_id,
            "clock": "of the first stage",
            "clock_error_s": dict(zip(measured.devices, measured.errors_s, strict=True)),
            "steps": [step.number for step in measured.steps],
            "step_bounds_s": [[step.start_s, step.end_s] for step in measured.steps],
            "simulated_beside_step": typical.number,
        },
    }


def read_trace(written: Mapping[str, Any]) -> Timeline:
    """The measured timeline in such a file: the inverse of ``trace_document``, to a nanosecond.

    Raises:
        ValueError, KeyError, TypeError: it is not such a file.
    """
    kinds = {label: kind for kind, label in KIND_LABELS.items()}
    spans: dict[int, list[TimelineSpan]] = {}
    for event in written["traceEvents"]:
        if event["pid"] == MEASURED_PID and event["ph"] == "X":
            stage, microbatch = int(event["tid"]) - 1, int(event["args"].get("microbatch", 0))
            kind = kinds[str(event["name"]).removesuffix(f" {microbatch}")]
            start_s = float(event["ts"]) / 1e6
            span = TimelineSpan(stage, kind, microbatch, start_s, start_s + float(event["dur"]) / 1e6)
            spans.setdefault(int(event["args"]["step"]), []).append(span)
    other = written["otherData"]
    errors_s = {str(device): float(error_s) for device, error_s in other["clock_error_s"].items()}
    steps = tuple(
        TimelineStep(int(number), float(start_s), float(end_s), tuple(spans.get(int(number), ())))
        for number, (start_s, end_s) in zip(other["steps"], other["step_bounds_s"], strict=True)
    )
    return Timeline(tuple(errors_s), steps, tuple(errors_s.values()))


def _names(pid: int, name: str, devices: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Metadata events: what processes and threads are called, and their order."""
    yield _metadata("process_name", pid, 0, {"name": name})
    yield _metadata("process_sort_index", pid, 0, {"sort_index": pid})
    for stage, device in enumerate(devices):
        yield _metadata("thread_name", pid, stage + 1, {"name": f"{stage} {device}"})
        yield _metadata("thread_sort_index", pid, stage + 1, {"sort_index": stage})


def _metadata(name: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "ts": 0, "args": args}


def _step(pid: int, step: TimelineStep, shift_s: float, flow: int) -> list[dict[str, Any]]:
    """One step's slices and arrows; ``flow``: the first free number of an arrow."""
    out = [_slice(pid, span, step.number, shift_s) for span in step.spans]
    computed = {
        (span.stage, span.kind, span.microbatch): span for span in step.spans if span.kind in ("F", "B")
    }
    for (stage, kind, microbatch), span in sorted(computed.items()):
        other = computed.get((stage + 1 if kind == "F" else stage - 1, kind, microbatch))
        if other is None:
            continue
        name = "activation" if kind == "F" else "gradient"
        common = {"name": name, "cat": "message", "pid": pid, "id": flow}
        # Within the slice, else the viewer can't tell which one an arrow belongs to.
        start_us = _us(span.end_s - 0.01 * span.seconds + shift_s)
        end_us = _us(other.start_s + 0.01 * other.seconds + shift_s)
        out.append({**common, "ph": "s", "tid": span.stage + 1, "ts": start_us})
        out.append({**common, "ph": "f", "bp": "e", "tid": other.stage + 1, "ts": end_us})
        flow += 1
    return out


def _slice(pid: int, span: TimelineSpan, step: int, shift_s: float) -> dict[str, Any]:
    """One span as a complete event (phase X)."""
    numbered = span.kind not in ("O", "C", "R")
    return {
        "name": f"{KIND_LABELS[span.kind]} {span.microbatch}" if numbered else KIND_LABELS[span.kind],
        "cat": "wait" if span.kind in (IDLE, TRANSFER) else "message" if span.kind in "RS" else "compute",
        "ph": "X",
        "ts": _us(span.start_s + shift_s),
        "dur": max(0.0, _us(span.seconds)),
        "pid": pid,
        "tid": span.stage + 1,
        "cname": _COLOURS[span.kind],
        "args": {"step": step, "microbatch": span.microbatch} if numbered else {"step": step},
    }


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
