"""A trace for https://ui.perfetto.dev or chrome://tracing: the Trace Event Format, JSON object form.

Two processes: what was measured, and the simulated step beside it, moved to the start of a typical measured
one. A thread a stage; an arrow (flow event) a message. Times are microseconds on the first stage's clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from skyctl.compare.timeline import IDLE, TRANSFER, WORDS, Bar, Step, Timeline

MEASURED_PID = 1
SIMULATED_PID = 2

_COLOURS = {
    "F": "thread_state_running",
    "B": "rail_animation",
    "W": "cq_build_passed",
    "O": "detailed_memory_dump",
    "C": "detailed_memory_dump",
    "S": "vsync_highlight_color",
    IDLE: "grey",
    TRANSFER: "yellow",
}
"""Names from the trace viewer's own palette (``cname``); Perfetto chooses by name instead."""


def document(measured: Timeline, simulated: Timeline, *, run_id: str) -> dict[str, Any]:
    """The whole file's content."""
    typical = measured.typical()
    events = [
        *_names(MEASURED_PID, "measured", measured.devices),
        *_names(SIMULATED_PID, "simulated", simulated.devices),
    ]
    flow = 0
    for step in measured.steps:
        made = _step(MEASURED_PID, step, 0.0, flow)
        flow += sum(event["ph"] == "s" for event in made)
        events += made
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


def read(written: Mapping[str, Any]) -> Timeline:
    """What was measured, out of such a file: ``document`` the other way round, to a nanosecond.

    Raises:
        ValueError, KeyError, TypeError: it is not such a file, or an older skyctl's.
    """
    kinds = {words: kind for kind, words in WORDS.items()}
    devices: dict[int, str] = {}
    bars: dict[int, list[Bar]] = {}
    for event in written["traceEvents"]:
        if event["pid"] != MEASURED_PID:
            continue
        if event["name"] == "thread_name":
            devices[int(event["tid"]) - 1] = str(event["args"]["name"]).partition(" ")[2]
        if event["ph"] == "X":
            words, _, number = str(event["name"]).rpartition(" ")
            kind = kinds.get(words if number.isdigit() else str(event["name"]))
            if kind is None:
                raise ValueError(f"a slice called {event['name']!r}")
            start_s = float(event["ts"]) / 1e6
            bar = Bar(
                int(event["tid"]) - 1,
                kind,
                int(event["args"].get("microbatch", 0)),
                start_s,
                start_s + float(event["dur"]) / 1e6,
            )
            bars.setdefault(int(event["args"]["step"]), []).append(bar)
    other = written["otherData"]
    errors = {str(name): float(error) for name, error in other["clock_error_s"].items()}
    rows = tuple(devices[row] for row in sorted(devices))
    steps = tuple(
        Step(int(number), float(start_s), float(end_s), tuple(bars.get(int(number), ())))
        for number, (start_s, end_s) in zip(other["steps"], other["step_bounds_s"], strict=True)
    )
    return Timeline(rows, steps, tuple(errors.get(device, 0.0) for device in rows))


def _names(pid: int, name: str, devices: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Metadata: what processes and threads are called, and their order."""
    yield _metadata("process_name", pid, 0, {"name": name})
    yield _metadata("process_sort_index", pid, 0, {"sort_index": pid})
    for row, device in enumerate(devices):
        yield _metadata("thread_name", pid, row + 1, {"name": f"{row} {device}"})
        yield _metadata("thread_sort_index", pid, row + 1, {"sort_index": row})


def _metadata(name: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "ts": 0, "args": args}


def _step(pid: int, step: Step, shift_s: float, flow: int) -> list[dict[str, Any]]:
    """One step's slices and arrows; ``flow``: the first free number of an arrow."""
    out = [_slice(pid, bar, step.number, shift_s) for bar in step.bars]
    computed = {(bar.row, bar.kind, bar.microbatch): bar for bar in step.bars if bar.kind in ("F", "B")}
    for (row, kind, microbatch), bar in sorted(computed.items()):
        other = computed.get((row + 1 if kind == "F" else row - 1, kind, microbatch))
        if other is None:
            continue
        name = "activation" if kind == "F" else "gradient"
        common = {"name": name, "cat": "message", "pid": pid, "id": flow}
        # Within the slice, else the viewer can't tell which one an arrow belongs to.
        start_us = _us(bar.end_s - 0.01 * bar.seconds + shift_s)
        end_us = _us(other.start_s + 0.01 * other.seconds + shift_s)
        out.append({**common, "ph": "s", "tid": bar.row + 1, "ts": start_us})
        out.append({**common, "ph": "f", "bp": "e", "tid": other.row + 1, "ts": end_us})
        flow += 1
    return out


def _slice(pid: int, bar: Bar, step: int, shift_s: float) -> dict[str, Any]:
    """A complete event."""
    numbered = bar.kind not in ("O", "C")
    return {
        "name": f"{WORDS[bar.kind]} {bar.microbatch}" if numbered else WORDS[bar.kind],
        "cat": "wait" if bar.kind in (IDLE, TRANSFER) else "message" if bar.kind == "S" else "compute",
        "ph": "X",
        "ts": _us(bar.start_s + shift_s),
        "dur": max(0.0, _us(bar.seconds)),
        "pid": pid,
        "tid": bar.row + 1,
        "cname": _COLOURS[bar.kind],
        "args": {"step": step, "microbatch": bar.microbatch} if numbered else {"step": step},
    }


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
