"""What all repetitions of a layer say, in seconds of the node."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from skyctl.probe.node.clock import estimate
from skyctl.probe.node.tally import Key, Tally

MOST_SPLIT = 2.0
"""What a backward in two parts may take of the whole one's time; more was a disturbance."""
NO_TIME = "there was no time for it"


@dataclass(frozen=True)
class Clock:
    """``stretch``: seconds of the node for one by the CPU's clock, None: times are the wall's already.

    ``interval``: how well that is known, relative. ``by_cpu``: whether repetitions are judged by the CPU's.
    """

    stretch: float | None
    by_cpu: bool
    interval: float


def figures(tally: Tally, key: Key, clock: Clock, action_s: float) -> dict[str, Any]:
    """``LayerTiming``'s figures of a layer at a size, or why there are none.

    Args:
        action_s: what a stage's forward and backward take whatever their layers, of the CPU's seconds where
            there is a stretch: it is taken off what a window of layers took.
    """
    samples, parts = tally.of(key), tally.splits.get(key)
    if not samples:
        return {"skipped": tally.skipped.get(key, NO_TIME)}
    found = estimate(samples, clock.stretch, tally.blocks_of(key))
    updates = tally.of((key[0], 0))
    own = tally.within(key, action_s, clock.stretch is not None)
    split_s = weight_s = None
    if parts:  # few repetitions, so not out of proportion to the whole
        split_s = found.backward_s * own * min(max(1.0, parts.ratio(clock.by_cpu)), MOST_SPLIT)
        weight_s = split_s * parts.share(clock.by_cpu)
    return {
        "forward_s": found.forward_s * own,
        "backward_s": found.backward_s * own,
        "optimizer_s": estimate(updates, clock.stretch).forward_s if updates else 0.0,
        "weight_s": weight_s,
        "split_s": split_s,
        "spread": found.spread,
        "repeats": found.repeats,
        "interval": found.interval and math.hypot(found.interval, clock.interval),
    }
