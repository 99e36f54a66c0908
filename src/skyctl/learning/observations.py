"""A run's observations of devices and links: kept in the cluster's profile, or planned with at once.

An observation is held against the probe's own figures, never against ones that an earlier observation has
changed, so that the same slowness seen three times is counted once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from skyctl.errors import InputError, MismatchError, SkyctlError
from skyctl.files import newest_profile, recent_profiles, write_atomic
from skyctl.learning.corrections import (
    LEAST_BYTES_SHARE,
    Corrections,
    Subject,
    estimate_profile,
    probed_at,
)
from skyctl.learning.evidence import UNSTEADY_RATIO, Evidence
from skyctl.learning.evidence_notes import contradiction_text, spread_text
from skyctl.learning.problem_from_profile import build_problem, measured_shape
from skyctl.learning.step_factors import step_factors
from skyctl.planner.plan_record import pipeline_simulations
from skyctl.records.base import timestamp
from skyctl.records.clock import is_ahead
from skyctl.records.measurement import Measurement
from skyctl.records.plan import Plan
from skyctl.records.problem import Link, Problem
from skyctl.records.profile import Observation, Profile, Remeasurement

AnyEvidence = TypeVar("AnyEvidence", Observation, Remeasurement)

LEAST_STEPS = 3
"""A run with fewer after its warm-up is not kept."""
LEAST_MESSAGE_S = 1e-3
"""A message that takes less is late by as much as its receiver takes to wake up: it tells no rate."""
RESTED_SHARE = 0.3
"""A device under a CPU quota that waits for more than this part of a step runs faster than its quota in
between; that is not how fast it would be with more to do."""
MOST_KEPT = 4
"""Observations of the same device or link, workload and microbatch size that are kept, the newest."""


def tells_layer_times(plan: Plan) -> bool:
    """Whether a run's times in layers say how fast devices are.

    Not those of rounds, of which an owner makes as much as it can, nor those with sums made beside them.
    """
    return not (plan.problem.rhythm.is_rounds or _sums_beside_layers(plan))


def _sums_beside_layers(plan: Plan) -> bool:
    return bool(plan.problem.rhythm.delay) and len(plan.pipelines) > 1


def _refuse_delayed(plan: Plan, done: Measurement) -> None:
    """Raises InputError where layers' times hold what sums took beside them."""
    if _sums_beside_layers(plan):
        raise InputError(
            f"gradients of run {done.run_id} were summed while its layers computed, so it does not tell how "
            "fast they are",
            hint="a run without --sync-delay does",
        )


def is_steady(done: Measurement) -> bool:
    """Whether the run's steps were alike enough to be believed."""
    return done.iteration_s.p90 <= UNSTEADY_RATIO * done.iteration_s.p10


def observe_run(profile: Profile, plan: Plan, done: Measurement, seen: str) -> list[Observation]:
    """A run's observations of each stage's device and of each link that was waited for.

    Nothing of rounds: how much of one an owner makes is its own affair.

    Args:
        profile: must hold the plan's workload; its figures are what the run is held against.
        seen: when (ISO).

    Raises:
        InputError: sums were made beside the run's layers.
        InputError, MismatchError: the profile does not hold what the plan used.
    """
    steps = len(done.steps) - 1
    if steps < LEAST_STEPS or profile.workload is None or plan.problem.rhythm.is_rounds:
        return []
    _refuse_delayed(plan, done)
    probed = _as_probed(plan, profile)
    about = Observation(
        run_id=done.run_id,
        seen=seen,
        steps=steps,
        spread=done.iteration_s.p90 / done.iteration_s.p10 if done.iteration_s.p10 > 0 else 1.0,
        device=plan.placed_stages[0].device,
        digest=profile.workload.digest,
        microbatch_size=measured_shape(profile, plan.problem.microbatches).microbatch_size,
        probed_s=1.0,  # of each that is found, its own
        seen_s=1.0,
    )
    observations = []
    timed = zip(probed.placed_stages, done.replicas, _stage_times(probed, done), strict=True)
    for stage, replica, (device, expected_s, took_s) in timed:
        layers = {
            "layers": (stage.start, stage.stop),
            "layers_spread": replica.layers_spread,
            "step_factors": step_factors(replica),
        }
        update = {"device": device, **layers}
        observations.append(about.model_copy(update=update | {"probed_s": expected_s, "seen_s": took_s}))
    for link, size, took_s in message_times(probed, done):
        expected_s = link.latency_s + size / link.bandwidth_bytes_per_s
        ends = {"device": link.source, "target": link.target, "message_bytes": size}
        observations.append(about.model_copy(update=ends | {"probed_s": expected_s, "seen_s": took_s}))
    return [obs for obs in observations if obs.seen_s > 0 and obs.probed_s > 0]


def _as_probed(plan: Plan, profile: Profile) -> Plan:
    """The same plan with the profile's own figures for its devices and links."""
    problem = plan.problem
    base = build_problem(
        profile, problem.microbatches, schedule=problem.schedule, objective=problem.objective
    )
    names = [stage.device for stage in plan.placed_stages]
    if missing := [name for name in names if name not in base.times]:
        raise MismatchError(f"device {missing[0]} is not in the profile")
    if len(base.layers) != len(problem.layers):
        raise MismatchError("the profile holds another number of layers than the plan")
    figures = {(link.source, link.target): link for link in base.links}
    links = []
    for link in problem.links:
        probed = figures.get((link.source, link.target), link)
        measured = {"latency_s": probed.latency_s, "bandwidth_bytes_per_s": probed.bandwidth_bytes_per_s}
        links.append(link.model_copy(update=measured))
    times = {**problem.times, **{name: base.times[name] for name in names}}
    actions = {device.id: device.action_s for device in base.devices}
    devices = tuple(
        device.model_copy(update={"action_s": actions.get(device.id, device.action_s)})
        for device in problem.devices
    )
    update = {"times": times, "links": tuple(links), "devices": devices}
    return plan.model_copy(update={"problem": problem.model_copy(update=update)})


def _stage_times(plan: Plan, done: Measurement) -> Iterator[tuple[str, float, float]]:
    """(device, its layers' seconds a step by the plan's problem, as seen; 0 where that tells nothing)."""
    cpus = {machine.device: machine.cpus for machine in plan.machines}
    stages = [(play, stage) for play in pipeline_simulations(plan) for stage in range(len(play.stages))]
    for (play, stage), replica in zip(stages, done.replicas, strict=True):
        layers = play.layer_times(stage)
        planned_s = play.microbatches * (layers.forward_s + layers.backward_s) + layers.optimizer_s
        took_s = replica.forward_s + replica.backward_s + replica.optimizer_s
        quota = cpus.get(replica.device, 0.0) % 1.0 > 0.0
        rested = replica.idle_s + replica.transfer_s > RESTED_SHARE * done.iteration_s.median
        yield replica.device, planned_s, 0.0 if quota and rested and took_s < planned_s else took_s


def message_times(plan: Plan, done: Measurement) -> Iterator[tuple[Link, float, float]]:
    """(link, a message's bytes, its seconds as seen): what was waited for, not over lines that are shared.

    Messages of less than ``LEAST_MESSAGE_S`` are left out.
    """
    links = {(link.source, link.target): link for link in plan.problem.links}
    shared = {(pair[0], pair[1]) for line in plan.problem.shared for pair in line.links}
    ranks = [(pipeline.stages, at) for pipeline in plan.pipelines for at in range(len(pipeline.stages))]
    for (stages, index), replica in zip(ranks, done.replicas, strict=True):
        ways = []
        if index:
            ways.append((stages[index - 1].device, index - 1, replica.input_message_s))
        if index + 1 < len(stages):
            ways.append((stages[index + 1].device, index, replica.gradient_message_s))
        for source, boundary, took_s in ways:
            link = links.get((source, replica.device))
            if link is None or took_s is None or (source, replica.device) in shared:
                continue
            if took_s < LEAST_MESSAGE_S:
                continue
            layer = plan.problem.layers[stages[boundary].stop - 1]
            yield link, layer.output_bytes * link.sent_share, took_s


def keep_observations(cluster: str, plan: Plan, digest: str, done: Measurement) -> str | None:
    """Adds what a run saw to the cluster's newest profile of its workload; returns what to tell the user.

    An error here becomes a sentence, and takes nothing away from the run.
    """
    try:
        kept = add_observations(cluster, plan, digest, done)
    except (MismatchError, InputError) as exc:
        return f"nothing was learned from this run: {exc.message}"
    except SkyctlError as exc:
        return f"what this run saw could not be kept: {exc.message}"
    if kept is None:
        return None
    profile, new = kept
    return _kept_text(gather_evidence(profile, recent_profiles(cluster)), new)


def add_observations(
    cluster: str, plan: Plan, digest: str, done: Measurement, only: Subject | None = None
) -> tuple[Profile, list[Observation]] | None:
    """The cluster's newest profile of the workload with what a run saw, and that; None: there is nothing.

    Its file is written anew in its place: a run makes no profile newer than others. Observations that the
    same run has added before give way, so that no run counts twice.

    Args:
        only: add this alone, and nothing where the run has added it before from more steps.

    Raises:
        InputError, MismatchError: see ``observe_run``.
        SkyctlError: a profile's file can't be read or written.
    """
    steps = len(done.steps) - 1
    if steps < LEAST_STEPS:
        return None
    ref = plan.workload
    used = {stage.device for stage in plan.placed_stages}

    def holds(profile: Profile) -> bool:
        workload = profile.workload
        if workload is None or ref is None or profile.encrypted != plan.encrypted:
            return False
        if is_ahead(profile.created):  # no next plan uses it (``profiles.find_profile``)
            return False
        sizes = [shape.microbatches for shape in workload.shapes]
        asked = (digest, ref.batch_size, ref.dtype)
        if (workload.digest, workload.batch_size, workload.dtype) != asked:
            return False
        fits = plan.problem.microbatches in sizes
        return fits and used <= {device.id for device in profile.devices}

    newest = newest_profile(cluster, holds)
    if newest is None:
        return None
    path, profile = newest
    new = observe_run(profile, plan, done, timestamp())
    mine = [obs for obs in profile.observations if obs.run_id == done.run_id]
    if only is not None:
        new = [obs for obs in new if (obs.device, obs.target) == only]
        mine = [obs for obs in mine if (obs.device, obs.target) == only]
        if any(obs.steps > steps for obs in mine):
            return None
    if not new:
        return None
    others = [obs for obs in profile.observations if obs not in mine]
    profile = profile.model_copy(update={"observations": newest_evidence([*others, *new])})
    write_atomic(path, profile.to_json())
    return profile, new


def _kept_text(profile: Profile, new: Sequence[Observation]) -> str:
    """Whether the next plan uses what a run saw, in words."""
    run_id, estimates = new[0].run_id, estimate_profile(profile)
    disturbed = [obs for obs in estimates.disturbed if obs.run_id == run_id]
    doubts = [contradiction for contradiction in estimates.contradictions if contradiction.run_id == run_id]
    used = any(
        source.run_id == run_id for estimate in estimates.by_subject.values() for source in estimate.sources
    )
    if doubts:
        rest = "; what else it saw is kept, and not planned with before that either" if not used else ""
        return "; ".join(contradiction_text(contradiction) for contradiction in doubts) + rest
    if disturbed:
        words = spread_text(disturbed[0])
        rest = "the next plan uses the rest" if used else "what it saw is kept, but not planned with"
        return f"this run was disturbed ({words}): {rest}"
    return (
        "what this run saw is kept; the next plan uses it (skyctl plan --no-learn: the probe's figures alone)"
    )


def gather_evidence(profile: Profile, others: Iterable[Profile]) -> Profile:
    """The profile with what was seen of the same figures since, whichever profiles it is kept in.

    If a figure was measured at another time than this profile's, it is not the same. Evidence dated ahead
    of this machine's clock is left out: it would outweigh all that is seen until then.
    """
    profiles = [*others, profile]

    def same(other: Profile, piece: Evidence) -> bool:
        if is_ahead(piece.seen):
            return False
        return other is profile or probed_at(other, piece) == probed_at(profile, piece)

    seen = [obs for other in profiles for obs in other.observations if same(other, obs)]
    remeasurements = [
        remeasurement
        for other in profiles
        for remeasurement in other.remeasurements
        if same(other, remeasurement)
    ]
    update = {"observations": newest_evidence(seen), "remeasurements": newest_evidence(remeasurements)}
    return profile.model_copy(update=update)


def newest_evidence(evidence: Iterable[AnyEvidence]) -> tuple[AnyEvidence, ...]:
    """Each once, the newest ``MOST_KEPT`` of the same kind, in the order of their dates."""
    kinds: dict[tuple[object, ...], list[AnyEvidence]] = {}
    once = {_identity(piece): piece for piece in evidence}
    for piece in sorted(once.values(), key=lambda o: o.seen):
        kinds.setdefault(_kind(piece), []).append(piece)
    kept = [piece for pieces in kinds.values() for piece in pieces[-MOST_KEPT:]]
    return tuple(sorted(kept, key=lambda piece: (piece.seen, piece.device, piece.target or "")))


def _kind(piece: Evidence) -> tuple[object, ...]:
    about = (piece.device, piece.target)
    return (*about, piece.digest, piece.microbatch_size) if isinstance(piece, Observation) else about


def _identity(piece: Evidence) -> tuple[object, ...]:
    return (
        *_kind(piece),
        *((piece.run_id, piece.layers) if isinstance(piece, Observation) else (piece.seen,)),
    )


def correct_from_run(plan: Plan, done: Measurement) -> tuple[Problem, list[str]]:
    """The problem that a run's plan answered, with the run's own figures in place of what was predicted.

    Raises:
        InputError: the run was too short, made rounds, or its sums were made beside its layers.
    """
    if plan.problem.rhythm.is_rounds:
        raise InputError(
            f"run {done.run_id} made rounds, which say nothing of a step's times",
            hint="leave --from-run out: a plan from the profile",
        )
    _refuse_delayed(plan, done)
    steps = len(done.steps) - 1
    if steps < LEAST_STEPS:
        raise InputError(
            f"run {done.run_id} has {max(0, steps)} steps after its warm-up; {LEAST_STEPS} are needed",
            hint=f"run it for longer: --steps {2 * LEAST_STEPS}",
        )
    factors = {
        device: took_s / planned_s
        for device, planned_s, took_s in _stage_times(plan, done)
        if took_s and planned_s
    }
    rates = {
        (link.source, link.target): size / (took_s - link.latency_s)
        for link, size, took_s in message_times(plan, done)
        if took_s - link.latency_s >= LEAST_BYTES_SHARE * took_s and size
    }
    planned_rates = {(link.source, link.target): link.bandwidth_bytes_per_s for link in plan.problem.links}
    words = [f"times of {device} {factor:.2f} × what its plan had" for device, factor in factors.items()]
    words += [
        f"rate of {source} → {target} {rate / planned_rates[source, target]:.2f} × what its plan had"
        for (source, target), rate in rates.items()
    ]
    return Corrections(factors, rates).apply_to(plan.problem), words
