"""Going on with a run: with the ranks of a supervisor that is gone, or from the last checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from skyctl.checkpoint.launcher.stored_run import StoredRun
from skyctl.errors import (
    InputError,
    MismatchError,
    NodeError,
    RunError,
    SkyctlError,
    UnreachableError,
)
from skyctl.files import RunPaths, read_record, write_atomic
from skyctl.jobs.node_sessions import require_all
from skyctl.jobs.training_request import TrainingRequest, refuse_unsummable
from skyctl.learning.corrections import Subject
from skyctl.learning.observations import add_observations, keep_observations
from skyctl.records.cluster import Cluster, node_of
from skyctl.records.measurement import Measurement
from skyctl.records.owners import local_steps_by_owner
from skyctl.records.plan import Plan, WorkloadRef
from skyctl.records.problem import Problem
from skyctl.records.run_state import RunState
from skyctl.remote.remote_task import RemoteTask
from skyctl.remote.session_factory import open_sessions
from skyctl.run.attempt import AdoptedRanks
from skyctl.run.callbacks import Detached, RunCallbacks
from skyctl.run.change_notes import round_notes
from skyctl.run.plan_runner import PlanRunner
from skyctl.run.plan_update import nodes_in
from skyctl.run.rank_spec import check_plan_fits
from skyctl.run.round_spec import refuse_trace
from skyctl.run.run_context import RunOptions
from skyctl.supervision.left_tasks import end_tasks, nodes_by_rank, ranks_of
from skyctl.supervision.run_handle import OnDetach, RunHandle, taken_over_run
from skyctl.supervision.run_lock import RunLock
from skyctl.supervision.run_logs import with_supervisor_log
from skyctl.supervision.run_settings import connect_of, options_of, request_of
from skyctl.workload.shipped_files import digest_workload


def take_over(
    lock: RunLock, callbacks: RunCallbacks, detach: OnDetach
) -> tuple[Measurement, RunPaths] | None:
    """Supervises the run to its end; None where it was detached from.

    Args:
        lock: of a run that has not ended. It may have while the lock was waited for (``RunLock.run_ended``).

    Raises:
        InputError: its files can't be read.
        SkyctlError: as ``Supervisor.run``.
    """
    told = with_supervisor_log(callbacks, lock.paths.supervisor_log)
    with taken_over_run(lock, told.note, told.phase) as handle:
        for name, error in {**handle.failures, **handle.gone}.items():
            told.warn(f"node {name}: {error.message}")
        tasks = ranks_of(handle)
        if tasks is None and handle.failures and not _some_rank_ended(handle):
            handle.leave()
            raise unreached_nodes_error(handle)
        if tasks is None:
            step = handle.state.checkpoint
            how = f"it goes on from the checkpoint of step {step}" if step else "it begins again"
            told.note(f"not all of its ranks are there any more: {how}")
            _reconnect_gone_nodes(handle, told)
        end_tasks(handle, but=(tasks or {}).values())
        return supervise_run(handle, plan_of(handle), callbacks, detach, tasks)


def supervise_run(
    handle: RunHandle,
    plan: Plan,
    callbacks: RunCallbacks,
    detach: OnDetach,
    tasks: dict[int, RemoteTask] | None = None,
) -> tuple[Measurement, RunPaths] | None:
    """Runs the handle's run to its end, as its state describes it; None where it was detached from.

    Args:
        tasks: by rank, those of an attempt that goes on already.
    """
    state, journal = handle.state, handle.journal
    callbacks = with_supervisor_log(callbacks, journal.paths.supervisor_log)
    digest = state.order.get("digest")

    def as_measured(played: Plan) -> bool:
        return played.encrypted or not options_of(state).encrypt

    def keep_part(played: Plan, seen: Measurement, part: Subject) -> bool:
        if not isinstance(digest, str) or not as_measured(played):
            return False
        with suppress(SkyctlError):  # at the run's end it is said what could not be kept
            return add_observations(handle.cluster.name, played, digest, seen, part) is not None
        return False

    supervisor = PlanRunner(
        plan,
        handle.cluster,
        request_of(state),
        handle.sessions,
        options_of(state),
        callbacks,
        journal,
        connect=connect_of(state),
        resume=tasks is None and bool(state.attempts),
        replaced=handle.replaced,
        keep_part=keep_part,
    )
    adopted = AdoptedRanks(tasks, journal.past(), journal.reported) if tasks is not None else None
    try:
        done, paths = supervisor.run(adopted)
    except Detached:
        detach(handle)
        return None
    played = read_record(Plan, paths.newest_plan)
    learned = isinstance(digest, str) and done.attempts == 1 and as_measured(played)
    if learned and (seen := keep_observations(handle.cluster.name, played, str(digest), done)) is not None:
        callbacks.note(seen)
    if output := state.order.get("output"):
        write_atomic(Path(str(output)), done.to_json(), mode=None)
    return done, paths


def _some_rank_ended(handle: RunHandle) -> bool:
    """Whether some rank is known to have ended. A node that can't be reached says nothing of its ranks."""
    if handle.state.status not in ("running", "stopping") or not handle.state.attempts:
        return bool(handle.sessions)
    nodes = nodes_by_rank(handle)
    if any(node in handle.gone for node in nodes):
        return True
    found = handle.ranks(nodes)
    return any(node in handle.sessions and (r not in found or found[r].done) for r, node in enumerate(nodes))


def unreached_nodes_error(handle: RunHandle) -> NodeError:
    """The error where a run may be training on nodes that can't be reached, and is left as it is."""
    names = ", ".join(handle.failures)
    return UnreachableError(
        f"run {handle.run_id} can't be taken over: {names} can't be reached, and nothing says that its ranks "
        "have ended; it is left as it is",
        node=next(iter(handle.failures)),
        hint=f"see whether your network or VPN is up, then: skyctl attach {handle.run_id}",
    )


def _reconnect_gone_nodes(handle: RunHandle, callbacks: RunCallbacks) -> None:
    """Opens new sessions with the nodes whose old ones have ended."""
    nodes = [node for node in handle.cluster.nodes if node.name in handle.gone]
    if not nodes:
        return
    callbacks.phase(f"connecting to {len(nodes)} nodes anew")
    for name, outcome in open_sessions(nodes, connect_of(handle.state)).items():
        if isinstance(outcome, SkyctlError):
            callbacks.warn(f"node {name}: {outcome.message}")
        else:
            handle.sessions[name] = outcome
    handle.note_sessions()
    if not handle.sessions:
        require_all({**handle.failures, **handle.gone})


def plan_of(handle: RunHandle) -> Plan:
    """The plan of the last attempt; RunError where the run had none yet."""
    paths = handle.journal.paths
    found = next((path for path in (paths.plan, paths.newest_plan) if path.is_file()), None)
    if found is None:
        raise RunError(
            f"run {paths.run_id} had no plan yet when its supervisor went: there is nothing to go on with, "
            "and it is ended",
            hint="launch it again",
        )
    return read_record(Plan, found)


# What a supervised run begins with: a fresh one, or one that has ended and goes on.


@dataclass(frozen=True)
class Resumption:
    """A run that has ended and is resumed.

    Attributes:
        nodes: those worth connecting to.
        done: the steps that its newest checkpoint has.
        given: the plan that the user gave it to go on with.
    """

    known: StoredRun
    request: TrainingRequest
    options: RunOptions
    nodes: tuple[str, ...]
    done: int
    given: Plan | None = None

    def plan_for(self, there: Collection[str]) -> Plan:
        """The plan to begin with: the one given; else the run's last, or its first where that knows more of
        the nodes there are.

        Nodes of it that are not there are left out by the supervisor.
        """
        if self.given is not None:
            return self.given
        last, first = self.known.plan, _first_plan(self.known)
        ours = {node_of(device.id) for device in last.problem.devices}
        more = {node_of(device.id) for device in first.problem.devices} & set(there)
        return last if more <= ours else first

    def words(self) -> list[str]:
        """What is about to be done, a sentence each."""
        total, unit = self.options.steps, self.known.plan.problem.rhythm.unit
        more = total - self.done
        said = [
            f"going on after {unit} {self.done}: {more} more, to {total}"
            if more
            else f"all {total} {unit}s are done: gathering what the run has ended with"
        ]
        schedule, before = self.request.recipe.lr_schedule, self.known.state.steps
        if schedule != "constant" and total != before:
            said.append(
                f"the {schedule} schedule of the learning rate goes over all {total} {unit}s now, "
                f"it went over {before}"
            )
        if self.given is not None:
            said += round_notes(self.known.plan, self.given)
        if self.known.state.order.get("own_lr_scheduler") is True and total != before:
            said.append(f"lr_scheduler() is told that the run has {total} {unit}s now, it was told {before}")
        return said


def prepare_resume(
    known: StoredRun,
    cluster: Cluster,
    steps: int | None,
    changed: Mapping[str, Any] | None = None,
    given: Plan | None = None,
) -> Resumption:
    """What resuming the run takes: request, options and nodes.

    Args:
        steps: so many more than its newest checkpoint has (None: to the end that it was to have).
        changed: fields of the run's ``RunOptions`` that take other values from now on.
        given: a plan of the user's for the same workload, to go on with in place of the run's own.

    Raises:
        InputError: it has no checkpoint, has ended well and nobody says for how many more steps it is to go
            on, or the plan is for something else.
        MismatchError: the workload has changed, or the plan is for devices that the cluster does not have.
        WorkloadError: the workload can't be read, or several pipelines of the plan can't sum its gradients.
    """
    state = known.state
    done = state.checkpoint
    if done is None:
        raise _nothing_kept_error(known)
    if state.status == "done" and steps is None:
        raise InputError(
            f"run {state.run_id} has ended well after {state.step} {known.plan.problem.rhythm.unit}s: for "
            "how many more is it to go on?",
            hint=f"skyctl launch --resume {state.run_id} --steps MORE",
        )
    total = max(done, state.steps or 0) if steps is None else done + steps
    options = replace(options_of(state), **(changed or {}), steps=total)
    request = request_of(state)
    request = replace(request, recipe=replace(request.recipe, total_steps=total))
    _refuse_changed_workload(state, request)
    if given is not None:
        check_same_training(known, given)
        check_plan_fits(given, cluster)
        if len(given.pipelines) > 1:
            refuse_unsummable(request.spec)
        request = replace(request, microbatches=given.problem.microbatches)
    refuse_trace((given or known.plan).problem.rhythm, trace=options.trace)
    holders = {node_of(device) for attempt in state.attempts for device in attempt.devices}
    for plan in (known.plan, _first_plan(known)):
        holders |= {node_of(device.id) for device in plan.problem.devices}
    wanted = holders | set(nodes_in(given) if given is not None else ())
    nodes = tuple(node.name for node in cluster.nodes if node.name in wanted)
    if not nodes:
        raise InputError(
            f"cluster {cluster.name!r} has none of the run's nodes ({', '.join(sorted(holders))})",
            hint="give the cluster file that it was launched with: -c FILE; or, for other nodes, a plan for "
            f"them: skyctl launch PLAN.json --resume {state.run_id}",
        )
    return Resumption(known, request, options, nodes, done, given)


def _refuse_changed_workload(state: RunState, request: TrainingRequest) -> None:
    """Raises MismatchError where the workload is not what the run's checkpoints are of."""
    began, now = state.order.get("digest"), digest_workload(request.spec)
    if began and began != now:
        raise MismatchError(
            f"{state.workload} is not what run {state.run_id} has trained so far (its digest is {now[:12]}, "
            f"the run's {str(began)[:12]})",
            hint="bring back the files as they were, or begin a new run with its weights: "
            f"skyctl launch {state.workload} --init-from {state.run_id}",
        )


def _nothing_kept_error(known: StoredRun) -> InputError:
    """The error of a run without any checkpoint; the hint says what is left to begin with."""
    state, asked = known.state, known.state.order.get("options")
    if state.status == "done" and known.paths.weights.is_file():
        hint = f"its weights are there: skyctl launch {state.workload} --init-from {state.run_id}"
    elif isinstance(asked, dict) and asked.get("checkpoint_every") == 0:
        hint = "launch it again, without --checkpoint-every 0"
    else:
        hint = "launch it again; --checkpoint-every N writes one every N steps"
    return InputError(f"run {state.run_id} has no checkpoint to go on from", hint=hint)


def check_same_training(known: StoredRun, plan: Plan) -> None:
    """Raises InputError where a plan is not for what the run trains, by batches of the same size.

    Nor may its steps be rounds where the run's are not, or rounds of other local steps: they would train on
    other batches than those that come next.
    """
    have, need = plan.workload, known.plan.workload
    if have is None or need is None:
        raise InputError("the plan was made from a problem file: it has no workload to go on with")
    for what, one, other in (
        ("--batch-size", have.batch_size, need.batch_size),
        ("--dtype", have.dtype, need.dtype),
        ("--seed", have.seed, need.seed),
        ("model and data", _named(have), _named(need)),
        ("number of layers", len(plan.problem.layers), known.layers),
        ("--local-steps", *_local_steps(plan.problem, known.plan.problem)),
    ):
        if one != other:
            raise other_training_error(known.state, f"the plan's {what}: {one}", other)


def _local_steps(one: Problem, other: Problem) -> tuple[str, str]:
    """The local steps that each asks for, in words: of the owners that both have, if there are any."""
    mine, others = local_steps_by_owner(one), local_steps_by_owner(other)
    common = mine.keys() & others.keys()

    def words(steps: Mapping[str, object]) -> str:
        kept = {owner: count for owner, count in steps.items() if not common or owner in common}
        return ", ".join(f"{count} of {owner}" if owner else f"{count}" for owner, count in kept.items())

    return words(mine) or "none", words(others) or "none"


def _named(workload: WorkloadRef) -> str:
    """A workload as far as its digest tells it from others; its source is for people."""
    return f"those of digest {workload.digest[:12]}"


def other_training_error(state: RunState, given: str, need: object) -> InputError:
    """The error where a run is to go on with other than what it has trained with so far.

    Args:
        given: what was given, as the first half of a sentence.
        need: what the run has.
    """
    return InputError(
        f"{given}; run {state.run_id} has {need}, and goes on as it has begun",
        hint=f"begin a new run with its weights: skyctl launch {state.workload} --init-from {state.run_id}",
    )


def _first_plan(known: StoredRun) -> Plan:
    """The plan of the run's first attempt, or of the newest that began with a plan of the user's own."""
    number = known.state.order.get("first_attempt", 1)
    path = RunPaths(known.paths.run_id, number if isinstance(number, int) else 1).plan
    return read_record(Plan, path) if path.is_file() else known.plan
