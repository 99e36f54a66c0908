"""What was seen of one device or link since the probe, weighed into a factor of the probe's seconds. Pure.

One disturbed run must not move the next plan, while what is slow for good has to be known soon. Both follow
from one rule, applied to everything seen in the order of its dates (``weigh``):

- What is within the allowance of the factor believed so far is agreement: the weighted median counts.
- What is faster is believed at once: something else slows a device down, nothing makes it faster than it is.
- What is slower contradicts, and counts for nothing until it is settled: by a new measurement of that node,
  by ``BELIEVED_RUNS`` runs that agree with each other, or by one that lasted ``BELIEVED_S``.
- Of a run that was uneven only that counts: what slows a device down for good is seldom even.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from skyctl.learning.figure_uncertainty import NORMAL_P10_P90
from skyctl.records.profile import Observation, Remeasurement

TIME_TOLERANCE = 0.25
"""How far a layer's time may be from the profile's, either way (docs/decisions.md)."""
RATE_TOLERANCE = 0.30
UNSTEADY_RATIO = 1.5
"""Steps whose p90 is more than so many times their p10 were disturbed: what they took is no measurement."""
BELIEVED_RUNS = 3
"""So many runs in turn that agree with each other are believed against probe and measurement."""
BELIEVED_S = 300.0
"""A run in which the device itself computed for so long, evenly, is believed alone."""
BETWEEN_RUNS = 0.05
"""Relative standard deviation between two steady runs of the same thing."""
HALF_LIFE_DAYS = 7.0
"""Something seen so long before the newest counts half as much."""
MEDIAN_ERROR = 1.25
"""Standard error of a normal sample's median, times that of its mean."""
COVERAGE_FACTOR = 2.0
"""Standard uncertainties that two figures of the same thing may be apart (95%)."""

Evidence = Observation | Remeasurement


@dataclass(frozen=True)
class Dismissal:
    """An observation that is not used, and what has shown it to be of something that passed."""

    observation: Observation
    by: Evidence


@dataclass(frozen=True)
class LearnedEstimate:
    """What is believed of one device or link.

    Attributes:
        factor: seconds ÷ the probe's.
        sources: the observations that it is the median of, oldest first; none where they say nothing new, or
            it is ``remeasured`` alone.
        remeasured: the measurement that ``factor`` is, or has confirmed it.
        contradictions: observations that are slower than can be, and that nothing has settled yet.
        dismissals: observations that were settled against.
    """

    factor: float = 1.0
    sources: tuple[Observation, ...] = ()
    remeasured: Remeasurement | None = None
    contradictions: tuple[Observation, ...] = ()
    dismissals: tuple[Dismissal, ...] = ()


@dataclass(frozen=True)
class Scale:
    """How one device's or link's evidence is read.

    Attributes:
        factor_of: an observation's seconds ÷ the probe's for the same.
        uncertainty: relative standard uncertainty of the probe's own figure.
        tolerance: what two measurements of the same thing differ by in any case, as a part of it.
    """

    factor_of: Callable[[Observation], float]
    uncertainty: float
    tolerance: float = TIME_TOLERANCE

    def allowance(self, one: Observation | None) -> float:
        """So many times longer than believed something may be seen without contradicting."""
        error = 0.0 if one is None else standard_error(one)
        parts = COVERAGE_FACTOR * self.uncertainty, COVERAGE_FACTOR * error
        return math.exp(math.hypot(math.log1p(self.tolerance), *parts))

    def median(self, observations: Sequence[Observation]) -> float:
        """The weighted median of the observations' factors."""
        newest = max(map(_day, observations))
        weights = [weight(one) * 0.5 ** ((newest - _day(one)) / HALF_LIFE_DAYS) for one in observations]
        return weighted_median(list(map(self.factor_of, observations)), weights)


def spread_of(one: Observation) -> float:
    """p90 / p10 of what was seen over the run's steps: the device's own where it is known."""
    return one.spread if one.layers_spread is None else one.layers_spread


def is_steady(one: Observation) -> bool:
    """Whether what was seen was alike enough from step to step to be believed."""
    return spread_of(one) <= UNSTEADY_RATIO


def standard_error(one: Observation) -> float:
    """Of the median over the run's steps, relative."""
    return MEDIAN_ERROR * math.log(max(1.0, spread_of(one))) / NORMAL_P10_P90 / math.sqrt(one.steps)


def weight(one: Observation) -> float:
    """How much an observation counts: one over its variance, that between runs included."""
    return 1.0 / (BETWEEN_RUNS**2 + standard_error(one) ** 2)


def weighted_median(values: Sequence[float], weights: Sequence[float]) -> float:
    """The least value that, with all smaller ones, has half of the weight."""
    left = sum(weights) / 2
    for value, heavy in sorted(zip(values, weights, strict=True)):
        left -= heavy
        if left <= 0:
            return value
    return max(values)


def weigh(evidence: Sequence[Evidence], scale: Scale) -> LearnedEstimate:
    """What all evidence of one device or link says together."""
    known = LearnedEstimate()
    for one in sorted(evidence, key=_order):
        known = _settled(known, one, scale) if isinstance(one, Remeasurement) else _seen(known, one, scale)
    return known


def _order(one: Evidence) -> tuple[float, bool]:
    """By date; of one second a run before the measurement that it is settled by."""
    return _day(one), isinstance(one, Remeasurement)


def _day(one: Evidence) -> float:
    return datetime.fromisoformat(one.seen).timestamp() / 86400.0


def _seen(known: LearnedEstimate, one: Observation, scale: Scale) -> LearnedEstimate:
    """The estimate after one more run."""
    factor, allowed = scale.factor_of(one), scale.allowance(one)
    if factor > allowed * known.factor:
        return _contradicted(known, one, scale)
    if not is_steady(one):
        return known
    passed = tuple(Dismissal(old, one) for old in known.contradictions)
    faster = factor < known.factor / allowed
    sources = (one,) if faster else (*known.sources, one)
    return LearnedEstimate(
        factor=scale.median(sources),
        sources=sources,
        remeasured=None if faster else known.remeasured,
        dismissals=known.dismissals + passed,
    )


def _contradicted(known: LearnedEstimate, one: Observation, scale: Scale) -> LearnedEstimate:
    """The estimate after a run that is too slow for it: believed where it lasted, or is not the first."""
    agreed = max(map(_day, known.sources), default=-math.inf)
    remeasured = [gone.observation for gone in known.dismissals if isinstance(gone.by, Remeasurement)]
    earlier = [old for old in remeasured if _day(old) > agreed] + list(known.contradictions)
    alike = [old for old in earlier if _near(scale.factor_of(old), scale.factor_of(one), scale)]
    together = (*sorted(alike, key=_order), one)
    lasted = one.target is None and is_steady(one) and one.steps * one.seen_s >= BELIEVED_S
    if not lasted and len({old.run_id for old in together}) < BELIEVED_RUNS:
        return replace(known, contradictions=(*known.contradictions, one))
    kept = tuple(gone for gone in known.dismissals if gone.observation not in together)
    return LearnedEstimate(factor=scale.median(together), sources=together, dismissals=kept)


def _settled(known: LearnedEstimate, one: Remeasurement, scale: Scale) -> LearnedEstimate:
    """The estimate after a measurement: it confirms the nearer of what was believed and what was seen."""
    alike = tuple(old for old in known.contradictions if _near(scale.factor_of(old), one.factor, scale))
    believed = _near(known.factor, one.factor, scale)
    if alike and believed and _apart(known.factor, one) < _apart(scale.median(alike), one):
        alike = ()
    gone = tuple(Dismissal(old, one) for old in known.contradictions if old not in alike)
    settled = replace(known, contradictions=(), dismissals=known.dismissals + gone)
    if alike:
        return replace(settled, factor=scale.median(alike), sources=alike, remeasured=one)
    return settled if believed else replace(settled, factor=one.factor, sources=(), remeasured=one)


def _apart(factor: float, one: Remeasurement) -> float:
    return abs(math.log(factor / one.factor))


def _near(factor: float, other: float, scale: Scale) -> bool:
    return abs(math.log(factor / other)) <= math.log(scale.allowance(None))
