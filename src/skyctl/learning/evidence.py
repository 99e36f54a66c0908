"""The evidence of one device or link since the probe, weighed into a factor of the probe's seconds. Pure.

One disturbed run must not move the next plan, while what is slow for good has to be known soon. Both follow
from one rule, applied to everything seen in the order of its dates (``weigh``):

- Evidence within the allowance of the factor believed so far is agreement: the weighted median counts.
- Faster evidence is believed at once: something else slows a device down, nothing makes it faster than it is.
- Slower evidence contradicts, and counts for nothing until it is settled: by a new measurement of that node,
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
    """The estimate for one device or link.

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

    def allowance(self, observation: Observation | None) -> float:
        """So many times longer than believed something may be seen without contradicting."""
        error = 0.0 if observation is None else standard_error(observation)
        parts = COVERAGE_FACTOR * self.uncertainty, COVERAGE_FACTOR * error
        return math.exp(math.hypot(math.log1p(self.tolerance), *parts))

    def median(self, observations: Sequence[Observation]) -> float:
        """The weighted median of the observations' factors."""
        newest = max(map(_day, observations))
        weights = [weight(obs) * 0.5 ** ((newest - _day(obs)) / HALF_LIFE_DAYS) for obs in observations]
        return weighted_median(list(map(self.factor_of, observations)), weights)


def spread_of(observation: Observation) -> float:
    """p90 / p10 of what was seen over the run's steps: the device's own where it is known."""
    return observation.spread if observation.layers_spread is None else observation.layers_spread


def is_steady(observation: Observation) -> bool:
    """Whether what was seen was alike enough from step to step to be believed."""
    return spread_of(observation) <= UNSTEADY_RATIO


def standard_error(observation: Observation) -> float:
    """Of the median over the run's steps, relative."""
    return (
        MEDIAN_ERROR
        * math.log(max(1.0, spread_of(observation)))
        / NORMAL_P10_P90
        / math.sqrt(observation.steps)
    )


def weight(observation: Observation) -> float:
    """How much an observation counts: one over its variance, that between runs included."""
    return 1.0 / (BETWEEN_RUNS**2 + standard_error(observation) ** 2)


def weighted_median(values: Sequence[float], weights: Sequence[float]) -> float:
    """The least value that, with all smaller ones, has half of the weight."""
    left = sum(weights) / 2
    for value, heavy in sorted(zip(values, weights, strict=True)):
        left -= heavy
        if left <= 0:
            return value
    return max(values)


def weigh(evidence: Sequence[Evidence], scale: Scale) -> LearnedEstimate:
    """The estimate that all evidence of one device or link gives together."""
    estimate = LearnedEstimate()
    for piece in sorted(evidence, key=_order):
        estimate = (
            _settled(estimate, piece, scale)
            if isinstance(piece, Remeasurement)
            else _seen(estimate, piece, scale)
        )
    return estimate


def _order(piece: Evidence) -> tuple[float, bool]:
    """By date; of one second a run before the measurement that it is settled by."""
    return _day(piece), isinstance(piece, Remeasurement)


def _day(piece: Evidence) -> float:
    return datetime.fromisoformat(piece.seen).timestamp() / 86400.0


def _seen(estimate: LearnedEstimate, observation: Observation, scale: Scale) -> LearnedEstimate:
    """The estimate after one more run."""
    factor, allowed = scale.factor_of(observation), scale.allowance(observation)
    if factor > allowed * estimate.factor:
        return _contradicted(estimate, observation, scale)
    if not is_steady(observation):
        return estimate
    passed = tuple(Dismissal(old, observation) for old in estimate.contradictions)
    faster = factor < estimate.factor / allowed
    sources = (observation,) if faster else (*estimate.sources, observation)
    return LearnedEstimate(
        factor=scale.median(sources),
        sources=sources,
        remeasured=None if faster else estimate.remeasured,
        dismissals=estimate.dismissals + passed,
    )


def _contradicted(estimate: LearnedEstimate, observation: Observation, scale: Scale) -> LearnedEstimate:
    """The estimate after a run that is too slow for it: believed where it lasted, or is not the first."""
    agreed = max(map(_day, estimate.sources), default=-math.inf)
    remeasured = [gone.observation for gone in estimate.dismissals if isinstance(gone.by, Remeasurement)]
    earlier = [old for old in remeasured if _day(old) > agreed] + list(estimate.contradictions)
    alike = [old for old in earlier if _near(scale.factor_of(old), scale.factor_of(observation), scale)]
    together = (*sorted(alike, key=_order), observation)
    lasted = (
        observation.target is None
        and is_steady(observation)
        and observation.steps * observation.seen_s >= BELIEVED_S
    )
    if not lasted and len({old.run_id for old in together}) < BELIEVED_RUNS:
        return replace(estimate, contradictions=(*estimate.contradictions, observation))
    kept = tuple(gone for gone in estimate.dismissals if gone.observation not in together)
    return LearnedEstimate(factor=scale.median(together), sources=together, dismissals=kept)


def _settled(estimate: LearnedEstimate, remeasurement: Remeasurement, scale: Scale) -> LearnedEstimate:
    """The estimate after a measurement: it confirms the nearer of what was believed and what was seen."""
    alike = tuple(
        old for old in estimate.contradictions if _near(scale.factor_of(old), remeasurement.factor, scale)
    )
    believed = _near(estimate.factor, remeasurement.factor, scale)
    if (
        alike
        and believed
        and _apart(estimate.factor, remeasurement) < _apart(scale.median(alike), remeasurement)
    ):
        alike = ()
    gone = tuple(Dismissal(old, remeasurement) for old in estimate.contradictions if old not in alike)
    settled = replace(estimate, contradictions=(), dismissals=estimate.dismissals + gone)
    if alike:
        return replace(settled, factor=scale.median(alike), sources=alike, remeasured=remeasurement)
    return (
        settled
        if believed
        else replace(settled, factor=remeasurement.factor, sources=(), remeasured=remeasurement)
    )


def _apart(factor: float, remeasurement: Remeasurement) -> float:
    return abs(math.log(factor / remeasurement.factor))


def _near(factor: float, other: float, scale: Scale) -> bool:
    return abs(math.log(factor / other)) <= math.log(scale.allowance(None))
