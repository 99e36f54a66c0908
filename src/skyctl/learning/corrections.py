"""Corrections of the problem that is planned, by what runs have seen since the probe. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from skyctl.learning.evidence import (
    RATE_TOLERANCE,
    Evidence,
    LearnedEstimate,
    Scale,
    is_steady,
    weigh,
)
from skyctl.learning.figure_uncertainty import (
    LEAST_TIME,
    combine_uncertainties,
    link_uncertainty,
    time_uncertainty,
)
from skyctl.learning.problem_from_profile import measured_shape
from skyctl.records.cluster import node_of
from skyctl.records.plan import Contradiction
from skyctl.records.problem import Device, LayerTimes, Problem
from skyctl.records.profile import LinkProfile, Observation, Profile

LEAST_BYTES_SHARE = 0.5
"""Part of a message's time that its bytes must have taken for a rate to be told from it."""

MOST_SPREAD = 0.3
"""Runs that are further apart say that something is wrong, not how long the next one will take."""

DevicePair = tuple[str, str]
Subject = tuple[str, "str | None"]
"""A device and None, or a link's two devices."""


@dataclass(frozen=True)
class Corrections:
    """The changes to a problem: by device how many times its layers' seconds, by link another rate.

    ``spreads``: by device, how far its runs were from each other, which makes its times less sure.
    """

    factors: Mapping[str, float] = field(default_factory=dict)
    rates: Mapping[DevicePair, float] = field(default_factory=dict)
    spreads: Mapping[str, float] = field(default_factory=dict)

    def apply_to(self, problem: Problem) -> Problem:
        """The problem with these times and rates."""
        times = {
            name: _scaled_times(layer_times, self.factors.get(name, 1.0))
            for name, layer_times in problem.times.items()
        }
        links = tuple(
            link.model_copy(update={"bandwidth_bytes_per_s": self.rates[link.source, link.target]})
            if (link.source, link.target) in self.rates
            else link
            for link in problem.links
        )
        devices = tuple(map(self._corrected_device, problem.devices))
        return problem.model_copy(update={"times": times, "links": links, "devices": devices})

    def _corrected_device(self, device: Device) -> Device:
        update: dict[str, Any] = {"action_s": device.action_s * self.factors.get(device.id, 1.0)}
        if device.time_uncertainty is not None:
            spread = self.spreads.get(device.id, 0.0)
            update["time_uncertainty"] = combine_uncertainties(device.time_uncertainty, spread)
        return device.model_copy(update=update)


def _scaled_times(times: LayerTimes, factor: float) -> LayerTimes:
    if factor == 1.0:
        return times
    return LayerTimes(
        **{name: value and tuple(factor * s for s in value) for name, value in dict(times).items()}
    )


@dataclass(frozen=True)
class LearnedEstimates:
    """The estimates of a profile's devices (target None) and links, by (device, target)."""

    by_subject: Mapping[Subject, LearnedEstimate] = field(default_factory=dict)
    scales: Mapping[Subject, Scale] = field(default_factory=dict)
    disturbed: tuple[Observation, ...] = ()

    def factor(self, observation: Observation) -> float:
        """Seconds as seen ÷ as probed."""
        return self.scales[observation.device, observation.target].factor_of(observation)

    def spreads(self) -> dict[str, float]:
        """By device, how far its undisturbed runs were from what is believed of it, relative.

        The standard deviation of ln(seen ÷ believed); of a single run its distance from the probe. Runs that
        were shown to be of something that passed are left out, and devices that no run has seen.
        """
        spreads = {}
        for (device, target), estimate in self.by_subject.items():
            seen = [math.log(self.factor(obs)) for obs in (*estimate.sources, *estimate.contradictions)]
            if target is None and seen:
                middle = math.log(estimate.factor) if len(seen) > 1 else 0.0
                squares = sum((value - middle) ** 2 for value in seen)
                spreads[device] = min(MOST_SPREAD, math.sqrt(squares / max(1, len(seen) - 1)))
        return spreads

    @property
    def contradictions(self) -> tuple[Contradiction, ...]:
        """The newest observation of each device and link that nothing has settled, devices first."""
        contradictions = []
        for (device, target), estimate in sorted(self.by_subject.items(), key=lambda item: item[0][1] or ""):
            if estimate.contradictions:
                newest = estimate.contradictions[-1]
                contradictions.append(
                    Contradiction(
                        run_id=newest.run_id,
                        seen=newest.seen,
                        device=device,
                        target=target,
                        factor=self.factor(newest),
                        believed=estimate.factor,
                    )
                )
        return tuple(contradictions)


@dataclass(frozen=True)
class LearnedCorrections:
    """The corrections by a profile's evidence at one microbatch size, and the estimates behind them."""

    corrections: Corrections = Corrections()
    estimates: LearnedEstimates = LearnedEstimates()


def learn_corrections(profile: Profile, microbatches: int) -> LearnedCorrections:
    """Corrections by what was seen of the profile's workload since the probe, weighed against its figures.

    A size that no run has used takes what was seen of the device at another size: else sizes that were never
    tried would always look better, or worse, than those that were.
    """
    if profile.workload is None or not (profile.observations or profile.remeasurements):
        return LearnedCorrections()
    size = measured_shape(profile, microbatches).microbatch_size
    estimates = estimate_profile(profile)
    factors: dict[str, float] = {}
    rates: dict[DevicePair, float] = {}
    for (device, target), estimate in estimates.by_subject.items():
        if not estimate.sources and estimate.remeasured is None:
            continue
        if target is None:
            sources = [obs for obs in estimate.sources if obs.microbatch_size == size] or estimate.sources
            factors[device] = estimates.scales[device, None].median(sources) if sources else estimate.factor
        elif (link := _link_of(profile, device, target)) is not None:
            rates[device, target] = (link.bandwidth_bytes_per_s or 0.0) / estimate.factor
    return LearnedCorrections(Corrections(factors, rates, estimates.spreads()), estimates)


def estimate_profile(profile: Profile) -> LearnedEstimates:
    """The estimate for each device and link of which anything was seen since the probe.

    If one device of a run was disturbed or is in doubt, nothing else of that run counts. Its neighbours
    waited for it, and had a machine that they share to themselves.
    """
    if profile.workload is None:
        return LearnedEstimates()
    remeasurements = [
        remeasurement
        for remeasurement in profile.remeasurements
        if _is_newer(remeasurement, probed_at(profile, remeasurement))
    ]
    mine = [
        obs
        for obs in profile.observations
        if obs.digest == profile.workload.digest and _is_newer(obs, probed_at(profile, obs))
    ]
    usable = [obs for obs in mine if obs.target is None or _tells_rate(profile, obs)]
    scales = _scales(profile, [*usable, *remeasurements])
    doubted = [
        obs
        for estimate in _weigh_all([*usable, *remeasurements], scales).values()
        for obs in _doubted(estimate)
    ]
    runs = {obs.run_id for obs in doubted if obs.target is None}
    runs |= {obs.run_id for obs in usable if obs.target is None and not is_steady(obs)}
    left = [obs for obs in usable if obs.run_id not in runs or obs in doubted or not is_steady(obs)]
    estimates = _weigh_all([*left, *remeasurements], scales)
    weighed = [obs for estimate in estimates.values() for obs in (*_doubted(estimate), *estimate.sources)]
    disturbed = tuple(obs for obs in mine if not is_steady(obs) and obs not in weighed)
    return LearnedEstimates(estimates, scales, disturbed)


def _doubted(estimate: LearnedEstimate) -> tuple[Observation, ...]:
    return (*estimate.contradictions, *(gone.observation for gone in estimate.dismissals))


def _weigh_all(
    evidence: Sequence[Evidence], scales: Mapping[Subject, Scale]
) -> dict[Subject, LearnedEstimate]:
    by_subject: dict[Subject, list[Evidence]] = {}
    for piece in evidence:
        if (piece.device, piece.target) in scales:
            by_subject.setdefault((piece.device, piece.target), []).append(piece)
    return {subject: weigh(pieces, scales[subject]) for subject, pieces in by_subject.items()}


def _scales(profile: Profile, evidence: Iterable[Evidence]) -> dict[Subject, Scale]:
    """How the evidence of each device and link is read; none for what the profile has no figures of."""
    scales: dict[Subject, Scale] = {}
    for piece in evidence:
        if piece.target is None:
            scales[piece.device, None] = Scale(_time_factor, _time_uncertainty(profile, piece.device))
        elif (link := _link_of(profile, piece.device, piece.target)) is not None:
            reading = _RateReading(link.latency_s or 0.0, link.bandwidth_bytes_per_s or 1.0)
            scales[piece.device, piece.target] = Scale(reading.factor, link_uncertainty(link), RATE_TOLERANCE)
    return scales


def _time_factor(observation: Observation) -> float:
    return observation.seen_s / observation.probed_s


@dataclass(frozen=True)
class _RateReading:
    """The probe's figures of a link, by which a message's seconds are read."""

    latency_s: float
    bandwidth_bytes_per_s: float

    def factor(self, observation: Observation) -> float:
        """Seconds of a message's bytes ÷ the probe's."""
        return (
            (observation.seen_s - self.latency_s)
            * self.bandwidth_bytes_per_s
            / (observation.message_bytes or 1.0)
        )


def _tells_rate(profile: Profile, observation: Observation) -> bool:
    """Whether at least ``LEAST_BYTES_SHARE`` of a message's time was its bytes."""
    link = _link_of(profile, observation.device, observation.target or "")
    if link is None or not observation.message_bytes:
        return False
    return observation.seen_s - (link.latency_s or 0.0) >= LEAST_BYTES_SHARE * observation.seen_s


def _time_uncertainty(profile: Profile, device_id: str) -> float:
    """Of the probe's figures of a device's layers, at the size where they are known least."""
    shapes = profile.workload.shapes if profile.workload is not None else ()
    uncertainties = [
        time_uncertainty(d, shape) for d in profile.devices if d.id == device_id for shape in shapes
    ]
    return max(uncertainties, default=LEAST_TIME)


def _link_of(profile: Profile, source: str, target: str) -> LinkProfile | None:
    """The probe's figures between two devices; None where it has none."""
    nodes = node_of(source), node_of(target)
    for link in profile.links:
        if (link.source, link.target) == nodes and None not in (link.latency_s, link.bandwidth_bytes_per_s):
            return link
    return None


def probed_at(profile: Profile, piece: Evidence) -> str:
    """When the probe measured the same thing (ISO)."""
    if piece.target is None:
        dates = [device.measured for device in profile.devices if device.id == piece.device]
    else:
        nodes = node_of(piece.device), node_of(piece.target)
        dates = [link.measured for link in profile.links if (link.source, link.target) == nodes]
    return (dates[0] if dates else None) or profile.created


def _is_newer(piece: Evidence, date: str) -> bool:
    try:
        return datetime.fromisoformat(piece.seen) >= datetime.fromisoformat(date)
    except (ValueError, TypeError):
        return False
