"""How sure a predicted step is: the plan is simulated with figures drawn at random from where they may lie.

Every device's layer times, its overhead and every link's messages are multiplied by a factor of their own,
and all of computing by one that they have in common (a machine is not the same while it trains as while it
was probed). Factors are log-normal, with the uncertainties that the problem has. The simulator tells what a
pipeline makes of them. The slowest of several stages is slower than the mean, so most intervals reach
further up than down.

The draws are a Latin hypercube (McKay, Beckman and Conover 1979), and each figure's depend on its name
alone: the same plan has the same interval, and two plans of one problem are compared under the same draws,
in which what they have in common is no difference.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist

from skyctl.planner.drawn_steps import TimeFactors, drawn_ratios
from skyctl.records.interval import INTERVAL_SHARE, Interval
from skyctl.records.measurement import quantile
from skyctl.records.plan import Plan
from skyctl.records.problem import Link

DRAWS = 100
COMMON_UNCERTAINTY = 0.04
"""Of all computing together: what the model of time leaves out (docs/decisions.md)."""


def with_interval(plan: Plan) -> Plan:
    """The plan with its predicted step's interval; as it is where its problem has no uncertainties."""
    drawn = _drawn_ratios(plan)
    if drawn is None:
        return plan
    step_s = plan.predicted.iteration_s
    low, high = _bounds(drawn)
    interval = Interval(low_s=min(1.0, low) * step_s, high_s=max(1.0, high) * step_s)
    return plan.model_copy(update={"predicted": plan.predicted.model_copy(update={"interval": interval})})


def ratio_interval(slower: Plan, faster: Plan) -> tuple[float, float] | None:
    """The range of ``slower``'s ``step_s`` ÷ ``faster``'s, with the same probability as an ``Interval``.

    None where either's problem has no uncertainties. If it holds 1, neither can be called faster.
    """
    drawn = _drawn_ratios(slower), _drawn_ratios(faster)
    if drawn[0] is None or drawn[1] is None:
        return None
    expected = slower.step_s / faster.step_s
    low, high = _bounds([expected * a / b for a, b in zip(drawn[0], drawn[1], strict=True)])
    return min(low, expected), max(high, expected)


def _bounds(values: Sequence[float]) -> tuple[float, float]:
    tail = (1 - INTERVAL_SHARE) / 2
    return quantile(values, tail), quantile(values, 1 - tail)


def _drawn_ratios(plan: Plan) -> list[float] | None:
    """By draw, the plan's step ÷ the one without uncertainties; None where there are none."""
    by_id = {device.id: device for device in plan.problem.devices}
    devices = [by_id[stage.device] for stage in plan.placed_stages]
    if plan.predicted.stale is not None:  # of a play with draws of its own
        return None
    if plan.predicted.iteration_s <= 0 or all(device.time_uncertainty is None for device in devices):
        return None
    return drawn_ratios(plan, _time_factors(), DRAWS)


def _time_factors() -> TimeFactors:
    common = _factors("all computing", COMMON_UNCERTAINTY)

    def with_common(name: str, uncertainty: float | None) -> tuple[float, ...]:
        own = _factors(name, uncertainty)
        return tuple(a * b for a, b in zip(common, own, strict=True))

    return TimeFactors(
        layers=lambda device: with_common(f"layers of {device.id}", device.time_uncertainty),
        overhead=lambda device: with_common(f"overhead of {device.id}", device.overhead_uncertainty),
        link=_link_factors,
    )


def _link_factors(link: Link | None) -> tuple[float, ...]:
    uncertainty = None if link is None else link.uncertainty
    return _factors(f"{link.source} → {link.target}" if link is not None else "", uncertainty)


@lru_cache(maxsize=4096)
def _standard_draws(name: str) -> tuple[float, ...]:
    """A standard normal's draws, one from each of ``DRAWS`` equally likely parts, in the name's own order."""
    points = [NormalDist().inv_cdf((i + 0.5) / DRAWS) for i in range(DRAWS)]
    random.Random(name).shuffle(points)  # noqa: S311 - draws, no secrets
    return tuple(points)


def _factors(name: str, uncertainty: float | None) -> tuple[float, ...]:
    """By draw, what the figures of that name are multiplied by; their median is 1."""
    if not uncertainty:
        return (1.0,) * DRAWS
    # a log-normal's own parameter: its relative standard deviation is then the uncertainty
    spread = math.sqrt(math.log1p(uncertainty**2))
    return tuple(math.exp(spread * z) for z in _standard_draws(name))
