"""Nodes that a run saw much slower than is known are measured again for some seconds, which settles it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from skyctl.files import newest_profile, write_atomic
from skyctl.jobs.node_sessions import NodeSessions
from skyctl.jobs.profile_recheck import most_microbatches, recheck_profile
from skyctl.jobs.training_request import TrainingRequest
from skyctl.learning.corrections import estimate_profile
from skyctl.learning.observations import newest_evidence
from skyctl.records.cluster import Cluster, node_of
from skyctl.records.plan import Contradiction
from skyctl.records.profile import LayerTiming, Profile, Remeasurement, layer_time_s

if TYPE_CHECKING:
    from skyctl.workload.workload import Workload


def recheck_contradictions(
    cluster: Cluster,
    links: NodeSessions,
    profile: Profile,
    request: TrainingRequest,
    workload: Workload,
    on_progress: Callable[[str], None],
    warn: Callable[[str], None],
) -> Profile:
    """The profile with what a quick look shows of the nodes that runs contradict it on; kept for later plans.

    Nodes of one machine are looked at together, since they load each other. The profile itself where nothing
    contradicts it.

    Args:
        warn: gets a sentence on each node that could not be measured.

    Raises:
        NodeError: no node answered.
    """
    asked = estimate_profile(profile).contradictions
    nodes = doubted_nodes(profile, asked) & set(links.sessions)
    if not nodes:
        return profile
    on_progress(f"measuring {', '.join(sorted(nodes))} again: a run saw what contradicts the probe")
    now = recheck_profile(
        Cluster(name=cluster.name, nodes=tuple(node for node in cluster.nodes if node.name in nodes)),
        NodeSessions({name: links.sessions[name] for name in links.sessions if name in nodes}, {}),
        profile,
        replace(request, microbatches=most_microbatches(profile), sweep=()),
        workload,
        on_progress,
        with_links=any(contradiction.target is not None for contradiction in asked),
    )
    for failure in now.failures:
        warn(f"{failure.node} could not be measured again: {failure.error}")
    new = remeasurements_of(profile, now, asked)
    keep_remeasurements(profile, new)
    return _with(profile, new)


def doubted_nodes(profile: Profile, asked: Collection[Contradiction]) -> set[str]:
    """The nodes of these contradictions, and all others of their machines."""
    named = {
        node_of(name)
        for contradiction in asked
        for name in (contradiction.device, contradiction.target)
        if name is not None
    }
    hosts = {node.hostname for node in profile.nodes if node.name in named}
    return named | {node.name for node in profile.nodes if node.hostname in hosts}


def remeasurements_of(
    then: Profile, now: Profile, asked: Collection[Contradiction]
) -> tuple[Remeasurement, ...]:
    """How the second profile's figures of the devices and links in question differ from the first's."""
    remeasured = []
    for contradiction in asked:
        factor = (
            _time_factor(then, now, contradiction.device)
            if contradiction.target is None
            else _rate_factor(then, now, contradiction)
        )
        if factor is not None:
            about = {"device": contradiction.device, "target": contradiction.target}
            remeasured.append(Remeasurement(seen=now.created, factor=factor, **about))  # type: ignore[arg-type]
    return tuple(remeasured)


def _time_factor(then: Profile, now: Profile, device: str) -> float | None:
    """Seconds of the layers that were measured now ÷ those of the same layers then; None: there are none."""
    was = {_key(t): layer_time_s(t) for d in then.devices if d.id == device for t in d.timings}
    again = {_key(t): layer_time_s(t) for d in now.devices if d.id == device for t in d.timings}
    both = [key for key, seconds in again.items() if seconds > 0 and was.get(key, 0.0) > 0]
    if not both:
        return None
    return sum(again[key] for key in both) / sum(was[key] for key in both)


def _key(timing: LayerTiming) -> tuple[str, int]:
    return timing.signature, timing.microbatch_size


def _rate_factor(then: Profile, now: Profile, contradiction: Contradiction) -> float | None:
    """The rate of a link then ÷ now; None where it was not measured."""
    nodes = node_of(contradiction.device), node_of(contradiction.target or "")
    was, again = (
        next((k.bandwidth_bytes_per_s for k in p.links if (k.source, k.target) == nodes), None)
        for p in (then, now)
    )
    return None if was is None or again is None else was / again


def keep_remeasurements(profile: Profile, new: tuple[Remeasurement, ...]) -> None:
    """Adds what was measured to the kept profile of the same probe; nothing where that is not kept."""
    newest = newest_profile(profile.cluster, lambda kept: _same_probe(kept, profile))
    if newest is not None and new:
        path, kept = newest
        write_atomic(path, _with(kept, new).to_json())


def _same_probe(kept: Profile, profile: Profile) -> bool:
    return (kept.created, kept.workload) == (profile.created, profile.workload)


def _with(profile: Profile, new: tuple[Remeasurement, ...]) -> Profile:
    kept = newest_evidence([*profile.remeasurements, *new])
    return profile.model_copy(update={"remeasurements": kept})
