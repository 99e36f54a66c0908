"""Plans of rounds: pipelines that make local steps by themselves and then average their weights.

All owners are in the plan, each with one device or with a pipeline of its own devices. Without owners,
devices share each batch as in data parallelism: of the fastest two, three, … those are taken whose round is
shortest for its local steps.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from skyctl.errors import InfeasibleError, InputError
from skyctl.planner.cost_model import StageAssignment
from skyctl.planner.data.holder_costs import chunk_bytes_at
from skyctl.planner.data.shares import level_shares
from skyctl.planner.evaluation import StageExecution
from skyctl.planner.hybrid.joint_sum import SumGroup, group_records, read_groups
from skyctl.planner.plan_record import make_certificate
from skyctl.planner.problem_parts import with_devices
from skyctl.planner.rounds.owner_plan import plan_owner
from skyctl.planner.rounds.round_model import LocalPipeline, RoundModel, RoundTimes
from skyctl.planner.stage_memory import fits_device, human_bytes
from skyctl.records.cluster import node_of
from skyctl.records.owners import owner_names
from skyctl.records.plan import Pipeline, PlacedStage, Plan, Prediction, Strategy, Unused
from skyctl.records.problem import Problem
from skyctl.records.sync import Sync

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
    model = RoundModel(problem)
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
    model = RoundModel(problem)
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
    pipelines = [_holder(model, d, shares[d]) for d in sorted(shares)]
    return _made_plan(model, "assigned", pipelines, "as assigned", began)


def plan_rounds_alone(problem: Problem, local_steps: Mapping[str, int]) -> Plan:
    """A plan of rounds of common batches that one device makes alone, for a run that has lost the others.

    Args:
        local_steps: by device, those of a round so far. One that had none makes the most of them.

    Raises:
        InfeasibleError: no device can hold all layers.
    """
    began = time.perf_counter()
    model = RoundModel(problem)
    able = _able(model)
    if not able:
        raise InfeasibleError(
            f"none of {len(problem.devices)} devices can hold all layers",
            hint="add memory or a machine; or leave --local-steps out",
        )
    steps = local_steps.get(model.ids[able[0]], max(local_steps.values(), default=1))
    alone = [_holder(model, able[0], problem.microbatches)]
    return _made_plan(model, "optimal", alone, ALONE_METHOD, began, [steps])


def predict_rounds(problem: Problem, plan: Plan) -> Prediction:
    """What a plan of rounds would take on ``problem``, over the routes that its record has.

    Raises:
        InputError: see ``api.predict``.
    """
    model = RoundModel(problem)
    pipelines, groups, steps = read_rounds(model, plan)
    return model.prediction(pipelines, groups, model.times(pipelines, groups, steps))


def read_rounds(model: RoundModel, plan: Plan) -> tuple[list[LocalPipeline], list[SumGroup], list[int]]:
    """A plan's pipelines, the groups whose weights are averaged, and by pipeline its local steps.

    Raises:
        InputError: see ``api.predict``.
    """
    pipelines = _read_pipelines(model, plan)
    steps = [pipeline.local_steps or 1 for pipeline in plan.pipelines]
    if len(pipelines) < 2 or plan.sync is None:
        return pipelines, [], steps
    placements = [one.placement for one in pipelines]
    return pipelines, read_groups(model.ids, placements, plan.sync.groups, model.routed), steps


def _holder(model: RoundModel, device: int, microbatches: int) -> LocalPipeline:
    """The pipeline of one stage that has all layers on a device, with so many microbatches a local step."""
    placement = (StageAssignment(device, 0, model.base.layers),)
    return LocalPipeline(placement, StageExecution.plain([1]), microbatches)


def _owners_pipelines(model: RoundModel, strategy: Strategy, time_limit_s: float) -> list[LocalPipeline]:
    problem = model.problem
    assert problem.owners is not None
    found = []
    names = owner_names(problem.owners)
    for name, nodes in zip(names, problem.owners, strict=True):
        ids = [device.id for device in problem.devices if node_of(device.id) in nodes]
        if len(ids) == 1:
            found.append(_holder(model, model.base.index(ids[0]), problem.microbatches))
            continue
        own = with_devices(model.base.problem, ids)
        pins = {field: getattr(own, field) or None for field in ("first_stage", "last_stage")}
        stages = plan_owner(
            own.model_copy(update=pins), name, strategy, time_limit_s / len(names), alone=len(names) == 1
        )
        placement = tuple(StageAssignment(model.base.index(s.device), s.start, s.stop) for s in stages)
        execution = StageExecution.plain([stage.in_flight for stage in stages])
        found.append(LocalPipeline(placement, execution, problem.microbatches))
    return found


def _able(model: RoundModel) -> list[int]:
    """The devices that may hold all layers, the fastest first."""
    problem = model.problem
    pins = [set(names) for names in (problem.first_stage, problem.last_stage) if names is not None]
    able = []
    for d, device in enumerate(problem.devices):
        cost = model.lines.cost(d, recompute=False)
        if all(device.id in names for names in pins) and fits_device(cost.memory_bytes, device):
            able.append((cost.microbatch_s, d))
    return [d for _, d in sorted(able)]


def _several(model: RoundModel) -> list[int]:
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


def _level(model: RoundModel) -> list[LocalPipeline]:
    """Of the fastest two, three, … devices those whose round is shortest for its local steps."""
    able = _several(model)
    best: tuple[float, list[LocalPipeline]] | None = None
    for count in range(2, min(len(able), model.problem.microbatches) + 1):
        holders = sorted(able[:count])
        costs = [model.lines.cost(d, recompute=False) for d in holders]
        shares = level_shares(
            [c.microbatch_s for c in costs], [c.optimizer_s for c in costs], model.problem.microbatches
        )
        assert shares is not None
        pipelines = [_holder(model, d, share) for d, share in zip(holders, shares, strict=True)]
        times = model.times(pipelines, model.groups(pipelines))
        per_step_s = times.round_s / max(times.local_steps)
        if best is None or per_step_s < best[0]:
            best = per_step_s, pipelines
    assert best is not None
    return best[1]


def _equal(model: RoundModel) -> list[LocalPipeline]:
    holders = sorted(_several(model))
    if model.problem.microbatches < len(holders):
        raise InfeasibleError(
            f"equal shares for {len(holders)} devices need as many microbatches, a step has "
            f"{model.problem.microbatches}",
            hint="more --microbatches",
        )
    share, more = divmod(model.problem.microbatches, len(holders))
    return [_holder(model, d, share + (number < more)) for number, d in enumerate(holders)]


def _made_plan(
    model: RoundModel,
    strategy: Strategy,
    pipelines: Sequence[LocalPipeline],
    method: str,
    began: float,
    steps: Sequence[int] | None = None,
) -> Plan:
    """The record. ``steps``: by pipeline, its local steps; None: as the problem asks for."""
    groups = model.groups(pipelines)
    times = model.times(pipelines, groups, steps)
    predicted = model.prediction(pipelines, groups, times)
    _require_room(model.problem, predicted)
    wall_s = time.perf_counter() - began
    used = {stage.device for one in pipelines for stage in one.placement}
    owned = {node for owner in model.problem.owners or () for node in owner}
    other = "no shorter round was found" if model.problem.owners is None else "it belongs to no owner"
    return Plan(
        form="pipelines",
        strategy=strategy,
        problem=model.problem,
        pipelines=_records(model, pipelines, times),
        unused=tuple(
            Unused(device=name, reason=FASTER if node_of(name) in owned else other)
            for d, name in enumerate(model.ids)
            if d not in used
        ),
        predicted=predicted,
        certificate=make_certificate(times.round_s, None, proved=False, method=method, wall_s=wall_s),
        sync=_sync_record(model, groups),
    )


def _records(
    model: RoundModel, pipelines: Sequence[LocalPipeline], times: RoundTimes
) -> tuple[Pipeline, ...]:
    found = []
    for one, steps in zip(pipelines, times.local_steps, strict=True):
        columns = zip(one.placement, one.execution.in_flight, strict=True)
        stages = tuple(
            PlacedStage(start=start, stop=stop, device=model.ids[d], in_flight=in_flight)
            for (d, start, stop), in_flight in columns
        )
        found.append(Pipeline(stages=stages, microbatches=one.microbatches, local_steps=steps))
    return tuple(found)


def _sync_record(model: RoundModel, groups: Sequence[SumGroup]) -> Sync | None:
    if not groups:
        return None
    return Sync(
        of="weights",
        format=model.problem.sync_format,
        chunk_bytes=chunk_bytes_at(max(group.routed.byte_s for group in groups)),
        groups=group_records(model.ids, groups),
    )


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


def _read_pipelines(model: RoundModel, plan: Plan) -> list[LocalPipeline]:
    found = []
    for number, pipeline in enumerate(plan.pipelines):
        for stage in pipeline.stages:
            if stage.device not in model.ids:
                raise InputError(f"the plan names device {stage.device!r}, which is not in the problem")
            if stage.recompute:
                raise InputError(f"pipeline {number} recomputes; those that make rounds do not")
        if pipeline.stages[-1].stop != model.base.layers:
            raise InputError(
                f"the plan covers {pipeline.stages[-1].stop} layers, the problem has {model.base.layers}"
            )
        placement = tuple(
            StageAssignment(model.base.index(s.device), s.start, s.stop) for s in pipeline.stages
        )
        execution = StageExecution.plain([stage.in_flight for stage in pipeline.stages])
        found.append(LocalPipeline(placement, execution, pipeline.microbatches))
    return found
