"""Whether a layer's time is known well enough, as the node judged it (``probe/node/samples.py``)."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from skyctl.records.profile import LayerTiming

CONVERGED_INTERVAL = 0.03
"""The interval, relative to the mean, that a probe measures until."""


def unconverged(timings: Sequence[LayerTiming], limit: float = CONVERGED_INTERVAL) -> list[LayerTiming]:
    """The timings of a device that are known less well than ``limit``; none that were skipped.

    A layer of next to nothing counts as known when its uncertainty is that small a part of the mean layer's
    time at its microbatch size.
    """
    means = {
        size: fmean(layer_time_s(t) for t in timings if t.microbatch_size == size and t.forward_s is not None)
        for size in {t.microbatch_size for t in timings if t.forward_s is not None}
    }
    return [
        timing
        for timing in timings
        if timing.forward_s is not None
        and (
            timing.interval is None
            or timing.interval * min(1.0, _time_share(layer_time_s(timing), means[timing.microbatch_size]))
            > limit
        )
    ]


def layer_time_s(timing: LayerTiming) -> float:
    """Seconds of a layer's forward and backward; 0 where it was skipped."""
    return (timing.forward_s or 0.0) + (timing.backward_s or 0.0)


def _time_share(own_s: float, mean_s: float) -> float:
    return own_s / mean_s if mean_s > 0 else 1.0
