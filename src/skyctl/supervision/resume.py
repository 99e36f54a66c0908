"""Resuming a run that has ended from its last checkpoint: what that takes, and what is refused."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from skyctl.checkpoint.launcher.stored_run import StoredRun
from skyctl.errors import (
    InputError,
    MismatchError,
)
from skyctl.files import RunPaths, read_record
from skyctl.jobs.training_request import TrainingRequest, refuse_unsummable
from skyctl.records.cluster import Cluster, node_of
from skyctl.records.owners import local_steps_by_owner
from skyctl.records.plan import Plan, WorkloadRef
from skyctl.records.plan_nodes import nodes_in
from skyctl.records.problem import Problem
from skyctl.records.run_state import RunState
from skyctl.run.change_notes import round_notes
from skyctl.run.expert_spec import check_expert_options, check_expert_plan
from skyctl.run.rank_spec import check_plan_fits
from skyctl.run.round_spec import refuse_trace
from skyctl.run.run_options import RunOptions
from skyctl.supervision.run_settings import options_of, request_of
from skyctl.workload.shipped_files import digest_workload


@dataclass(frozen=True)
class Resumption:
    """A run that has ended and is resumed.

    Attributes:
        nodes: those worth connecting to.
        done: the steps that its newest checkpoint has.
        given: the plan that the user gave it to go on with.
    """

    run: StoredRun
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
        last, first = self.run.plan, _first_plan(self.run)
        ours = {node_of(device.id) for device in last.problem.devices}
        more = {node_of(device.id) for device in first.problem.devices} & set(there)
        return last if more <= ours else first

    def words(self) -> list[str]:
        """The actions about to be taken, a sentence each."""
        total, unit = self.options.steps, self.run.plan.problem.rhythm.unit
        more = total - self.done
        said = [
            f"going on after {unit} {self.done}: {more} more, to {total}"
            if more
            else f"all {total} {unit}s are done: gathering what the run has ended with"
        ]
        schedule, before = self.request.recipe.lr_schedule, self.run.state.steps
        if schedule != "constant" and total != before:
            said.append(
                f"the {schedule} schedule of the learning rate goes over all {total} {unit}s now, "
                f"it went over {before}"
            )
        if self.given is not None:
            said += round_notes(self.run.plan, self.given)
        if self.run.state.order.get("own_lr_scheduler") is True and total != before:
            said.append(f"lr_scheduler() is told that the run has {total} {unit}s now, it was told {before}")
        return said


def prepare_resume(
    run: StoredRun,
    cluster: Cluster,
    steps: int | None,
    changed: Mapping[str, Any] | None = None,
    given: Plan | None = None,
) -> Resumption:
    """The request, options and nodes that resuming the run takes.

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
    state = run.state
    done = state.checkpoint
    if done is None:
        raise _nothing_kept_error(run)
    if state.status == "done" and steps is None:
        raise InputError(
            f"run {state.run_id} has ended well after {state.step} {run.plan.problem.rhythm.unit}s: for "
            "how many more is it to go on?",
            hint=f"skyctl launch --resume {state.run_id} --steps MORE",
        )
    total = max(done, state.steps or 0) if steps is None else done + steps
    options = replace(options_of(state), **(changed or {}), steps=total)
    request = request_of(state)
    request = replace(request, recipe=replace(request.recipe, total_steps=total, patience_from=done))
    _refuse_changed_workload(state, request)
    if given is not None:
        check_same_training(run, given)
        check_plan_fits(given, cluster)
        if len(given.pipelines) > 1:
            refuse_unsummable(request.spec)
        request = replace(request, microbatches=given.problem.microbatches)
    refuse_trace((given or run.plan).problem.rhythm, trace=options.trace)
    if options.experts is not None:
        clip_norm = request.recipe.clip_norm
        check_expert_options(clip_norm=clip_norm, elastic=options.elastic, turns=options.turns)
        check_expert_plan(given or run.plan, options.experts)
    its_nodes = {node_of(device) for attempt in state.attempts for device in attempt.devices}
    for plan in (run.plan, _first_plan(run)):
        its_nodes |= {node_of(device.id) for device in plan.problem.devices}
    wanted = its_nodes | set(nodes_in(given) if given is not None else ())
    nodes = tuple(node.name for node in cluster.nodes if node.name in wanted)
    if not nodes:
        raise InputError(
            f"cluster {cluster.name!r} has none of the run's nodes ({', '.join(sorted(its_nodes))})",
            hint="give the cluster file that it was launched with: -c FILE; or, for other nodes, a plan for "
            f"them: skyctl launch PLAN.json --resume {state.run_id}",
        )
    return Resumption(run, request, options, nodes, done, given)


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


def _nothing_kept_error(run: StoredRun) -> InputError:
    """The error of a run without any checkpoint; the hint says what is left to begin with."""
    state, asked = run.state, run.state.order.get("options")
    if state.status == "done" and run.paths.weights.is_file():
        hint = f"its weights are there: skyctl launch {state.workload} --init-from {state.run_id}"
    elif isinstance(asked, dict) and asked.get("checkpoint_every") == 0:
        hint = "launch it again, without --checkpoint-every 0"
    else:
        hint = "launch it again; --checkpoint-every N writes one every N steps"
    return InputError(f"run {state.run_id} has no checkpoint to go on from", hint=hint)


def check_same_training(run: StoredRun, plan: Plan) -> None:
    """Raises InputError where a plan is not for what the run trains, by batches of the same size.

    Nor may its steps be rounds where the run's are not, or rounds of other local steps: they would train on
    other batches than those that come next.
    """
    have, need = plan.workload, run.plan.workload
    if have is None or need is None:
        raise InputError("the plan was made from a problem file: it has no workload to go on with")
    for what, given, needed in (
        ("--batch-size", have.batch_size, need.batch_size),
        ("--dtype", have.dtype, need.dtype),
        ("--seed", have.seed, need.seed),
        ("model and data", _named(have), _named(need)),
        ("number of layers", len(plan.problem.layers), run.layers),
        ("--local-steps", *_local_steps(plan.problem, run.plan.problem)),
    ):
        if given != needed:
            raise other_training_error(run.state, f"the plan's {what}: {given}", needed)


def _local_steps(problem: Problem, other: Problem) -> tuple[str, str]:
    """The local steps that each asks for, in words: of the owners that both have, if there are any."""
    mine, others = local_steps_by_owner(problem), local_steps_by_owner(other)
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


def _first_plan(run: StoredRun) -> Plan:
    """The plan of the run's first attempt, or of the newest that began with a plan of the user's own."""
    number = run.state.order.get("first_attempt", 1)
    path = RunPaths(run.paths.run_id, number if isinstance(number, int) else 1).plan
    return read_record(Plan, path) if path.is_file() else run.plan
