"""What runs have seen since the probe, put to the problem that is planned. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from skyctl.control.problem_from_profile import measured_shape
from skyctl.records.cluster import node_of
from skyctl.records.problem import LayerTimes, Problem
from skyctl.records.profile import Observation, Profile

UNSTEADY_RATIO = 1.5
"""A run whose steps' p90 is more than so many times their p10 was disturbed: kept, not used."""
LEAST_BYTES_SHARE = 0.5
"""Part of a message's time that its bytes must have taken for a rate to be told from it."""

DevicePair = tuple[str, str]
RunNotes = list[tuple[str, str]]


@dataclass(frozen=True)
class Corrections:
    """What to change of a problem: by device how many times its layers' seconds, by link another rate."""

    factors: Mapping[str, float] = field(default_factory=dict)
    rates: Mapping[DevicePair, float] = field(default_factory=dict)

    def apply_to(self, problem: Problem) -> Problem:
        """The problem with these times and rates."""
        times = {
            name: _scaled_times(known, self.factors.get(name, 1.0)) for name, known in problem.times.items()
        }
        links = tuple(
            link.model_copy(update={"bandwidth_bytes_per_s": self.rates[link.source, link.target]})
            if (link.source, link.target) in self.rates
            else link
            for link in problem.links
        )
        devices = tuple(
            device.model_copy(update={"action_s": device.action_s * self.factors.get(device.id, 1.0)})
            for device in problem.devices
        )
        return problem.model_copy(update={"times": times, "links": links, "devices": devices})


def _scaled_times(times: LayerTimes, factor: float) -> LayerTimes:
    if factor == 1.0:
        return times
    return LayerTimes(
        **{name: value and tuple(factor * s for s in value) for name, value in dict(times).items()}
    )


def spread_text(one: Observation) -> str:
    """How uneven the steps of an observation's run were, in words."""
    return f"its steps' p90 is {one.spread:.1f} times their p10"


@dataclass(frozen=True)
class LearnedCorrections:
    """What a profile's observations say at one microbatch size, and notes on what comes from which run."""

    corrections: Corrections = Corrections()
    notes: tuple[str, ...] = ()


def learn_corrections(profile: Profile, microbatches: int) -> LearnedCorrections:
    """Corrections by observations of the profile's workload that are newer than the probe's own figures.

    A size that no run has used takes what was seen of the device at another size: else sizes that were never
    tried would always look better, or worse, than those that were.
    """
    if profile.workload is None or not profile.observations:
        return LearnedCorrections()
    size = measured_shape(profile, microbatches).microbatch_size
    mine = [one for one in profile.observations if one.digest == profile.workload.digest]
    factors, notes = _device_factors(profile, mine, size)
    rates, link_notes = _link_rates(profile, mine)
    ignored = [one for one in mine if one.spread > UNSTEADY_RATIO and _is_newer(one, probed_at(profile, one))]
    said = [
        f"as seen in run {run}: {', '.join(parts)}"
        for run, parts in _notes_by_run(notes + link_notes).items()
    ]
    said += [
        f"run {run} was disturbed ({spread_text(one)}): not used"
        for run, one in {one.run_id: one for one in ignored}.items()
    ]
    return LearnedCorrections(Corrections(factors, rates), tuple(said))


def _notes_by_run(notes: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for run, text in notes:
        found.setdefault(run, []).append(text)
    return found


def _device_factors(
    profile: Profile, observations: Sequence[Observation], size: int
) -> tuple[dict[str, float], RunNotes]:
    """By device, seconds as measured ÷ as probed; and notes as (run, text)."""
    factors: dict[str, float] = {}
    notes = []
    for device in profile.devices:
        found = _usable_observations(
            [o for o in observations if o.device == device.id and o.target is None], profile
        )
        found = [one for one in found if one.microbatch_size == size] or found
        if found:
            one = found[-1]
            factors[device.id] = one.seen_s / one.probed_s
            notes.append((one.run_id, f"times of {device.id} {factors[device.id]:.2f} × the probe's"))
    return factors, notes


def _link_rates(
    profile: Profile, observations: Sequence[Observation]
) -> tuple[dict[DevicePair, float], RunNotes]:
    """By link of the plan, its bytes per second; and notes as (run, text)."""
    rates: dict[DevicePair, float] = {}
    notes = []
    latency = {(link.source, link.target): link.latency_s for link in profile.links}
    probed = {(link.source, link.target): link.bandwidth_bytes_per_s for link in profile.links}
    pairs = {(one.device, one.target) for one in observations if one.target is not None}
    for source, target in sorted((a, b) for a, b in pairs if b is not None):
        nodes = node_of(source), node_of(target)
        bandwidth, latency_s = probed.get(nodes), latency.get(nodes)
        if bandwidth is None or latency_s is None:
            continue
        found = _usable_observations(
            [o for o in observations if (o.device, o.target) == (source, target)], profile
        )
        found = [
            one
            for one in found
            if one.seen_s - latency_s >= LEAST_BYTES_SHARE * one.seen_s and one.message_bytes
        ]
        if found:
            one = found[-1]
            rates[source, target] = (one.message_bytes or 0.0) / (one.seen_s - latency_s)
            share = rates[source, target] / bandwidth
            notes.append((one.run_id, f"rate of {source} → {target} {share:.2f} × the probe's"))
    return rates, notes


def _usable_observations(observations: Sequence[Observation], profile: Profile) -> list[Observation]:
    """The observations of undisturbed runs that are newer than the probe, oldest first."""
    found = [one for one in observations if one.spread <= UNSTEADY_RATIO]
    return sorted((o for o in found if _is_newer(o, probed_at(profile, o))), key=lambda one: one.seen)


def probed_at(profile: Profile, one: Observation) -> str:
    """When the probe measured the same thing (ISO)."""
    if one.target is None:
        dates = [device.measured for device in profile.devices if device.id == one.device]
    else:
        nodes = node_of(one.device), node_of(one.target)
        dates = [link.measured for link in profile.links if (link.source, link.target) == nodes]
    return (dates[0] if dates else None) or profile.created


def _is_newer(one: Observation, date: str) -> bool:
    try:
        return datetime.fromisoformat(one.seen) >= datetime.fromisoformat(date)
    except (ValueError, TypeError):
        return False
