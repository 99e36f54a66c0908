"""Traces made by hand: two stages, two microbatches, clocks that differ."""

from __future__ import annotations

from typing import Any

from skyctl.compare.timeline import Timeline, measured_timeline, simulated_timeline
from skyctl.schedule.simulation_input import SimulationInput
from skyctl.schedule.step_times import BoundaryTimes, MessageTimes, StageTimes

DEVICES = ("n1/cpu:0", "n2/cpu:0")
HOP = MessageTimes(link_s=0.2, latency_s=0.1)
PLAY = SimulationInput(
    "1f1b", 2, (2, 1), (0, 0), (StageTimes(1, 2, 0.5), StageTimes(1, 2, 0.5)), (BoundaryTimes(HOP, HOP),)
)
AHEAD_S = 1000.0
"""How far the second rank's clock is ahead of the first one's."""


def documents(steps: int = 3) -> list[dict[str, Any]]:
    """The traces of two ranks that did just what ``PLAY`` says, 20 s a step, on their own clocks."""
    from_simulator = simulated_timeline(PLAY, DEVICES).steps[0]
    out: list[dict[str, Any]] = []
    for row, ahead_s in enumerate((50.0, 50.0 + AHEAD_S)):
        recorded = []
        for number in range(steps):
            base_s = ahead_s + 20.0 * number
            spans = [
                [bar.kind, bar.microbatch, base_s + bar.start_s, base_s + bar.end_s]
                for bar in sorted(from_simulator.spans, key=lambda bar: bar.start_s)
                if bar.stage == row
            ]
            end_s = base_s + from_simulator.seconds if number == steps - 1 else base_s + 20.0
            recorded.append({"step": number, "start_s": base_s, "end_s": end_s, "spans": spans})
        reading = {"offset_s": -AHEAD_S, "error_s": 0.001}
        clocks = {"start": {"at_s": ahead_s, **reading}, "end": {"at_s": ahead_s + 60.0, **reading}}
        out.append({"clocks": clocks if row else {}, "steps": recorded})
    return out


def two_timelines(steps: int = 3) -> tuple[Timeline, Timeline]:
    """(measured, simulated)."""
    return measured_timeline(documents(steps), DEVICES), simulated_timeline(PLAY, DEVICES)
