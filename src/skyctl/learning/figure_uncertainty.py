"""How far a profile's figures may be from what a run takes, from what the probe saw while it measured. Pure.

Each is a relative standard uncertainty (JCGM 100), put together as the root of the squares of its parts. The
constants are of 60 runs on five kinds of machines; ``benchmarks/predictions.py`` shows how well they hold
(docs/decisions/measuring.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from skyctl.records.problem import MOST_UNCERTAINTY
from skyctl.records.profile import (
    Conditions,
    DeviceProfile,
    LayerTiming,
    LinkProfile,
    Profile,
    ShapeProfile,
    layer_time_s,
)

LEAST_TIME = 0.04
"""Of layers: the same device is not the same minutes later, however well it was measured."""
OVERHEAD = 0.5
"""Of what a stage does beside its layers."""
RATE = 0.05
ESTIMATED_RATE = 0.15
"""Of a link's rate as measured, and as filled in from those of its sites."""
HALF_NORMAL_95 = 2.0
"""``LayerTiming.interval`` is so many standard errors."""
NORMAL_P10_P90 = 2.56
"""From p10 to p90 of a normal distribution, in standard deviations; ``LayerTiming.spread`` is that."""
LASTING_SHARE = 0.25
"""How much of the blocks' spread a run's median still has: most of it averages out."""
OTHERS_SHARE = 0.5
"""How much the part of a device that others took, processes or the host's guests, may change until a run."""
HALTING = 0.08
"""Of a virtual machine's cores that halt: the host gives them to others, more or less often in the run."""
AWAKE_SHARE = 0.02
"""Cores that halt for less of the time are kept awake."""
MOST_BY_SLICES = 0.5
"""Of steps shorter than a pause: most have none, the others several times as long."""
LEAST_LEFT = 0.1
"""If less of a device was left to the probe, its times count as known no worse than with that."""


def combine_uncertainties(*parts: float) -> float:
    """The uncertainty of independent parts; at most what a problem may say, which is as good as not known."""
    return min(MOST_UNCERTAINTY, math.hypot(*parts))


def time_uncertainty(device: DeviceProfile, shape: ShapeProfile) -> float:
    """Of the seconds of a device's layers at one microbatch size, before any run has seen them."""
    return combine_uncertainties(LEAST_TIME, *_sampling(device, shape), _others(device.conditions))


def hardly_known_devices(profile: Profile) -> list[str]:
    """The ids of devices whose layer times are as uncertain as can be said, at any microbatch size."""
    shapes = profile.workload.shapes if profile.workload is not None else ()
    return [
        device.id
        for device in profile.devices
        if any(time_uncertainty(device, shape) >= MOST_UNCERTAINTY for shape in shapes)
    ]


def slice_uncertainty(slice_s: float, period_s: float, forward_s: float, step_s: float) -> float:
    """Of a stage's seconds under a CPU quota, for its slices.

    A forward that does not fit into one is held back until the next period, and so is the message that it
    waits for: each by a time between nothing and a pause, about which the periods' phases decide, and those
    stay as they are for a whole run. Taken as two uniform distributions. And a step of few periods has a
    pause more or less: half of one is its standard deviation.

    Args:
        slice_s: of each period, how long the node may run.
        period_s: of its quota.
        forward_s, step_s: of one microbatch, and of all of a step, pauses included.
    """
    pause_s = period_s - slice_s
    held_back = pause_s / math.sqrt(6) / forward_s if forward_s > period_s else 0.0
    return min(MOST_BY_SLICES, math.hypot(held_back, pause_s / 2 / step_s if step_s > 0 else 0.0))


def link_uncertainty(link: LinkProfile) -> float:
    """Of the seconds that a message's bytes take on a link."""
    return ESTIMATED_RATE if link.estimated else RATE


def _sampling(device: DeviceProfile, shape: ShapeProfile) -> tuple[float, float]:
    """(how well means are known, how much of the blocks' spread lasts), by their shares of the time."""
    timings: Mapping[str, LayerTiming] = {
        t.signature: t for t in device.timings if t.microbatch_size == shape.microbatch_size
    }
    layer_timings = [timings[layer.signature] for layer in shape.layers if layer.signature in timings]
    total_s = sum(map(layer_time_s, layer_timings))
    if total_s <= 0:
        return 0.0, 0.0
    error = sum(layer_time_s(t) * (t.interval or 0.0) for t in layer_timings) / total_s / HALF_NORMAL_95
    spread = sum(layer_time_s(t) * (t.spread or 0.0) for t in layer_timings) / total_s / NORMAL_P10_P90
    return error, LASTING_SHARE * spread


def _others(conditions: Conditions | None) -> float:
    """The uncertainty from others' being busier, or less busy, in the run."""
    if conditions is None:
        return 0.0
    left = (1.0 if conditions.share is None else conditions.share) * (1.0 - (conditions.stolen_share or 0.0))
    halting = HALTING if (conditions.halted_share or 0.0) > AWAKE_SHARE else 0.0
    return math.hypot(OTHERS_SHARE * (1.0 / max(left, LEAST_LEFT) - 1.0), halting)
