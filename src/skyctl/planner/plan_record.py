"""From a placement to a plan record: its prediction, certificate, and why devices stay unused."""

from __future__ import annotations

from skyctl.errors import InfeasibleError
from skyctl.planner import stage_memory
from skyctl.planner.cost_model import CostModel, Placement
from skyctl.planner.evaluation import StageExecution, bottleneck_s, simulate_step
from skyctl.planner.explanation.unused_devices import explain_unused
from skyctl.planner.tie_exchange import tie_exchange_s
from skyctl.records.plan import (
    Certificate,
    Pipeline,
    PlacedStage,
    Plan,
    Prediction,
    ProofStatus,
    ReplicaPrediction,
    Strategy,
)


def make_prediction(model: CostModel, placement: Placement, execution: StageExecution) -> Prediction:
    """What the simulator and the memory formula say of one step, the ties' exchange at its end included."""
    step = simulate_step(model, placement, execution)
    needs = _needs_bytes(model, placement, execution)
    columns = zip(placement, step.compute_s, step.idle_s, needs, strict=True)
    sync_s = tie_exchange_s(model, placement)
    return Prediction(
        iteration_s=step.iteration_s + sync_s,
        bottleneck_s=bottleneck_s(model, placement, execution),
        sync_s=sync_s,
        replicas=tuple(
            ReplicaPrediction(device=model.ids[d], compute_s=compute_s, idle_s=idle_s, memory_bytes=need)
            for (d, _, _), compute_s, idle_s, need in columns
        ),
    )


def _needs_bytes(model: CostModel, placement: Placement, execution: StageExecution) -> list[float]:
    """Bytes that each stage needs on its device."""
    problem = model.problem
    return [
        stage_memory.device_bytes(problem, problem.devices[d], p, q, k, deferred, recompute=recompute)
        for (d, p, q), k, deferred, recompute in zip(placement, *execution, strict=True)
    ]


def require_allowed(model: CostModel, placement: Placement, execution: StageExecution, what: str) -> None:
    """Raises InfeasibleError naming the device that is too small, or where it may not be.

    ``what``: how the message calls the placement.
    """
    problem = model.problem
    for (d, p, q), need in zip(placement, _needs_bytes(model, placement, execution), strict=True):
        device = problem.devices[d]
        if not stage_memory.fits_device(need, device):
            assert device.memory_bytes is not None
            raise InfeasibleError(
                f"{what} gives {device.id} layers [{p}, {q}), which need {stage_memory.human_bytes(need)}; "
                f"it has {stage_memory.human_bytes(device.memory_bytes)}",
                hint="another strategy may fit: heuristic or optimal",
            )
    for names, d, where in (
        (problem.first_stage, placement[0].device, "first"),
        (problem.last_stage, placement[-1].device, "last"),
    ):
        if names is not None and model.ids[d] not in names:
            allowed = ", ".join(names) if names else "none"
            raise InfeasibleError(
                f"{what} puts {model.ids[d]} at the {where} stage; allowed there: {allowed}",
                hint="another strategy may fit: heuristic or optimal",
            )


def make_certificate(
    value: float, bound: float | None, *, proved: bool, method: str, wall_s: float
) -> Certificate:
    """An honest one: ``optimal`` only where proved, ``bounded`` only with a bound above zero."""
    status: ProofStatus = "optimal"
    gap: float | None = 0.0
    if proved or (bound is not None and value <= bound):
        bound = value
    elif bound is None or bound <= 0:
        status, bound, gap = "feasible", None, None
    else:
        gap = value / bound - 1
        status = "optimal" if gap <= 1e-9 else "bounded"
    return Certificate(
        status=status, value_s=value, lower_bound_s=bound, gap=gap, method=method, wall_s=wall_s
    )


def make_plan(
    model: CostModel,
    strategy: Strategy,
    placement: Placement,
    execution: StageExecution,
    proof: Certificate,
    *,
    whole_blocks: bool = False,
) -> Plan:
    """The plan record. ``whole_blocks``: only plans that cut between transformer blocks were searched."""
    stages = tuple(
        PlacedStage(
            start=p,
            stop=q,
            device=model.ids[d],
            in_flight=in_flight,
            recompute=recompute,
            weights_behind=deferred,
        )
        for (d, p, q), in_flight, deferred, recompute in zip(placement, *execution, strict=True)
    )
    return Plan(
        strategy=strategy,
        problem=model.problem,
        pipelines=(Pipeline(stages=stages, microbatches=model.microbatches),),
        unused=explain_unused(model, strategy, placement, proof, whole_blocks=whole_blocks),
        predicted=make_prediction(model, placement, execution),
        certificate=proof,
    )
