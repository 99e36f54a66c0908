"""Several pipelines that another planner chose, as a plan of skyctl's: only the choice differs."""

from __future__ import annotations

from collections.abc import Sequence

from baselines.common import Assignment
from skyctl.planner.cost_model import StageAssignment
from skyctl.planner.hybrid.hybrid_model import Draft, HybridModel
from skyctl.planner.plan_record import make_certificate, make_plan
from skyctl.records.plan import Plan


def as_plan(hybrid: Plan, pipelines: Sequence[Assignment], shares: Sequence[int]) -> Plan | None:
    """A plan to launch, its gradients summed as skyctl would; None: memory, a pin or a tie does not allow it.

    Args:
        hybrid: a plan of several pipelines for the same workload and machines.
        pipelines: their stages, each pipeline over all layers.
        shares: the microbatches of each.
    """
    model = HybridModel(hybrid.problem)
    placements = tuple(
        tuple(StageAssignment(model.ids.index(device), a, b) for device, a, b in row) for row in pipelines
    )
    step = model.step(Draft(placements, tuple(shares)))
    if step is None:
        return None
    proof = make_certificate(step.iteration_s, None, proved=False, method="as it was given", wall_s=0.0)
    kept = {"workload": hybrid.workload, "machines": hybrid.machines, "encrypted": hybrid.encrypted}
    return make_plan(model, "heuristic", step, proof, lambda _: "not assigned").model_copy(update=kept)
