"""Plans of rounds: pipelines that make local steps by themselves and then average their weights.

All owners are in the plan, each with one device or with a pipeline of its own devices. Without owners,
devices share each batch as in data parallelism: of the fastest two, three, … those are taken whose round is
shortest for its local steps.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from skyctl.errors import InfeasibleError, InputError
from skyctl.planner.candidate import Candidate, PlannedPipeline, layer_groups
from skyctl.planner.cost_model import StageAssignment
from skyctl.planner.data.replica_costs import ReplicaCosts
from skyctl.planner.evaluation import StageExecution
from skyctl.planner.fastest_groups import FastestGroups
from skyctl.planner.plan_record import make_certificate, make_plan
from skyctl.planner.problem_parts import with_devices
from skyctl.planner.requirements import require_consistent
from skyctl.planner.rhythms import Step
from skyctl.planner.rounds.owner_plan import plan_owner
from skyctl.planner.stage_memory import fits_device, human_bytes
from skyctl.planner.step import play
from skyctl.records.cluster import node_of
from skyctl.records.owners import owner_names
from skyctl.records.plan import Plan, Prediction, Strategy
from skyctl.records.problem import Problem
from skyctl.schedule.batch_shares import best_shares

OWNERS_METHOD = "all owners, each on its own devices"
LEVEL_METHOD = "level shares over the fastest devices"
FASTER = "no faster plan for its owner was found with it"
EVEN_METHOD = "equal shares for all devices"
ALONE_METHOD = "the fastest device that holds all layers"


def plan_rounds(problem: Problem, strategy: Strategy, time_limit_s: float) -> Plan:
    """A plan of rounds by any strategy but ``assigned``.

    Raises:
        InputError: ``alone``: one device averages with nobody; or a schedule or objective of one pipeline.
        InfeasibleError: an owner's devices, or no two devices, can hold the layers.
        UndecidedError: no pipeline was found for an owner in time.
    """
    if strategy == "alone" and problem.owners is None:
        raise InputError(
            "one device alone has nobody to average its weights with", hint="leave --local-steps out"
        )
    if problem.owners is not None and not problem.owners:
        raise InfeasibleError("no owner of data is left to train", hint="bring one back, then resume the run")
    began = time.perf_counter()
    model = _costs(problem)
    if problem.owners is not None:
        pipelines = _owners_pipelines(model, strategy, time_limit_s)
        return _made_plan(model, strategy, pipelines, OWNERS_METHOD, began)
    if strategy == "even":
        return _made_plan(model, strategy, _equal(model), EVEN_METHOD, began)
    return _made_plan(model, strategy, _level(model), LEVEL_METHOD, began)


def assigned_rounds(problem: Problem, assignment: Sequence[tuple[str, int]]) -> Plan:
    """The plan with a user's own shares, (device, microbatches), of common batches.

    Raises:
        InputError: the problem has owners; unknown or repeated device, a share below 1, or shares that do not
            add up to the step's microbatches.
        InfeasibleError: a device's memory does not allow it.
    """
    if problem.owners is not None:
        raise InputError("--assign shares common batches, and owners have batches of their own")
    began = time.perf_counter()
    model = _costs(problem)
    shares: dict[int, int] = {}
    for name, count in assignment:
        if name not in model.ids:
            raise InputError(f"the assignment names device {name!r}, the problem has: {', '.join(model.ids)}")
        if model.base.index(name) in shares or count < 1:
            raise InputError(f"the assignment names {name!r} more than once, or gives it no microbatch")
        shares[model.base.index(name)] = count
    if (total := sum(shares.values())) != problem.microbatches:
        raise InputError(
            f"the assignment's shares add up to {total} microbatches, the step has {problem.microbatches}"
        )
    pipelines = [_replica(model, d, shares[d]) for d in sorted(shares)]
    return _made_plan(model, "assigned", pipelines, "as assigned", began)


def plan_rounds_alone(problem: Problem, local_steps: Mapping[str, int]) -> Plan:
    """A plan of rounds of common batches that one device makes alone, for a run that has lost the others.

    Args:
        local_steps: by device, those of a round so far. One that had none makes the most of them.

    Raises:
        InfeasibleError: no device can hold all layers.
    """
    began = time.perf_counter()
    model = _costs(problem)
    able = _able(model)
    if not able:
        raise InfeasibleError(
            f"none of {len(problem.devices)} devices can hold all layers",
            hint="add memory or a machine; or leave --local-steps out",
        )
    steps = local_steps.get(model.ids[able[0]], max(local_steps.values(), default=1))
    alone = _replica(model, able[0], problem.microbatches)._replace(local_steps=steps)
    return _made_plan(model, "optimal", [alone], ALONE_METHOD, began)


def _costs(problem: Problem) -> ReplicaCosts:
    require_consistent(problem)
    return ReplicaCosts(problem)


def _replica(model: ReplicaCosts, device: int, microbatches: int) -> PlannedPipeline:
    """The pipeline of one stage that has all layers on a device, with so many microbatches a local step."""
    placement = (StageAssignment(device, 0, model.base.layers),)
    return PlannedPipeline(placement, StageExecution.plain([1]), microbatches)


def _owners_pipelines(model: ReplicaCosts, strategy: Strategy, time_limit_s: float) -> list[PlannedPipeline]:
    problem = model.problem
    assert problem.owners is not None
    pipelines = []
    names = owner_names(problem.owners)
    for name, nodes in zip(names, problem.owners, strict=True):
        ids = [device.id for device in problem.devices if node_of(device.id) in nodes]
        if len(ids) == 1:
            pipelines.append(_replica(model, model.base.index(ids[0]), problem.microbatches))
            continue
        own = with_devices(model.base.problem, ids)
        pins = {field: getattr(own, field) or None for field in ("first_stage", "last_stage")}
        stages = plan_owner(
            own.model_copy(update=pins), name, strategy, time_limit_s / len(names), alone=len(names) == 1
        )
        placement = tuple(StageAssignment(model.base.index(s.device), s.start, s.stop) for s in stages)
        execution = StageExecution.plain([stage.in_flight for stage in stages])
        pipelines.append(PlannedPipeline(placement, execution, problem.microbatches))
    return pipelines


def _able(model: ReplicaCosts) -> list[int]:
    """The devices that may hold all layers, the fastest first."""
    problem = model.problem
    pins = [set(names) for names in (problem.first_stage, problem.last_stage) if names is not None]
    able = []
    for d, device in enumerate(problem.devices):
        cost = model.cost(d, recompute=False)
        if all(device.id in names for names in pins) and fits_device(cost.memory_bytes, device):
            able.append((cost.microbatch_s, d))
    return [d for _, d in sorted(able)]


def _several(model: ReplicaCosts) -> list[int]:
    """The devices that may hold all layers, the fastest first, of which there are two or more."""
    able, problem = _able(model), model.problem
    if len(able) < 2:
        raise InfeasibleError(
            f"{len(able)} of {len(problem.devices)} devices can hold all layers, and rounds need two or more",
            hint="add memory or a machine; or leave --local-steps out",
        )
    if problem.microbatches < 2:
        raise InfeasibleError(
            "two devices need two microbatches, a step has 1", hint="--microbatches 2 or more"
        )
    return able


def _level(model: ReplicaCosts) -> list[PlannedPipeline]:
    """Of the fastest two, three, … devices those whose round is shortest for its local steps."""
    able = _several(model)
    best: tuple[float, list[PlannedPipeline]] | None = None
    for count in range(2, min(len(able), model.problem.microbatches) + 1):
        replicas = sorted(able[:count])
        costs = [model.cost(d, recompute=False) for d in replicas]
        shares = best_shares(
            model.problem.microbatches, [c.optimizer_s for c in costs], [c.microbatch_s for c in costs]
        )
        pipelines = [_replica(model, d, share) for d, share in zip(replicas, shares, strict=True)]
        step = _step(model, pipelines)
        per_step_s = step.iteration_s / max(
            pipeline.local_steps or 1 for pipeline in step.candidate.pipelines
        )
        if best is None or per_step_s < best[0]:
            best = per_step_s, pipelines
    assert best is not None
    return best[1]


def _equal(model: ReplicaCosts) -> list[PlannedPipeline]:
    replicas = sorted(_several(model))
    if model.problem.microbatches < len(replicas):
        raise InfeasibleError(
            f"equal shares for {len(replicas)} devices need as many microbatches, a step has "
            f"{model.problem.microbatches}",
            hint="more --microbatches",
        )
    share, more = divmod(model.problem.microbatches, len(replicas))
    return [_replica(model, d, share + (number < more)) for number, d in enumerate(replicas)]


def _step(model: ReplicaCosts, pipelines: Sequence[PlannedPipeline]) -> Step:
    """The round of these pipelines, which average what they share over the fastest rings and stars."""
    groups = layer_groups([pipeline.placement for pipeline in pipelines]) if len(pipelines) > 1 else []
    sums = FastestGroups(model)
    return play(model, Candidate(tuple(pipelines), tuple(sums.group(*layers) for layers in groups)))


def _made_plan(
    model: ReplicaCosts, strategy: Strategy, pipelines: Sequence[PlannedPipeline], method: str, began: float
) -> Plan:
    """The record of these pipelines' round.

    Raises:
        InfeasibleError: a device has no memory for its part.
    """
    step = _step(model, pipelines)
    wall_s = time.perf_counter() - began
    owned = {node for owner in model.problem.owners or () for node in owner}
    other = "no shorter round was found" if model.problem.owners is None else "it belongs to no owner"
    proof = make_certificate(step.iteration_s, None, proved=False, method=method, wall_s=wall_s)
    plan = make_plan(
        model, strategy, step, proof, lambda d: FASTER if node_of(model.ids[d]) in owned else other
    )
    _require_room(model.problem, plan.predicted)
    return plan


def _require_room(problem: Problem, predicted: Prediction) -> None:
    """Raises InfeasibleError that names a device whose memory is too small."""
    devices = {device.id: device for device in problem.devices}
    for replica in predicted.replicas:
        device = devices[replica.device]
        if not fits_device(replica.memory_bytes, device):
            assert device.memory_bytes is not None
            raise InfeasibleError(
                f"{device.id} needs {human_bytes(replica.memory_bytes)} for its part of a round, it has "
                f"{human_bytes(device.memory_bytes)}",
                hint="add memory, or a machine to the owner (--owners a+b)",
            )
