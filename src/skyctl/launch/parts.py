"""The parts of a stage's time, as measured by its rank and as the plan's prediction has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from skyctl.schedule.playing import Play
from skyctl.schedule.simulate import Hop

PARTS = ("forward_s", "backward_s", "optimizer_s", "input_message_s", "gradient_message_s")


def measured_parts(events: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Medians of one rank's step events; None where no step has that figure."""
    out: dict[str, float | None] = {}
    for name in PARTS:
        known = [float(event[name]) for event in events if event.get(name) is not None]
        out[name] = median(known) if known else None
    return out


def predicted_parts(play: Play | None, stage: int) -> dict[str, float | None]:
    """The same of the plan: the layers' forward and backward of a whole step, a message's way unqueued."""
    if play is None:
        return dict.fromkeys(PARTS)
    times, count = play.layers(stage), play.microbatches
    return {
        "forward_s": count * times.forward_s,
        "backward_s": count * times.backward_s,
        "optimizer_s": times.optimizer_s,
        "input_message_s": way_s(play.boundaries[stage - 1].forward) if stage else None,
        "gradient_message_s": way_s(play.boundaries[stage].backward)
        if stage + 1 < len(play.stages)
        else None,
    }


def way_s(hop: Hop) -> float:
    """Seconds from a message's start to its arrival where nothing else is on its way."""
    return max([hop.link_s, *(seconds for _, seconds in hop.shared)]) + hop.latency_s
