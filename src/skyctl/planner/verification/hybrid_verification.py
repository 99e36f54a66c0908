"""Checks of a plan of several pipelines: shape, memory, what is summed, the predicted step, and its bound."""

from __future__ import annotations

from skyctl.errors import InputError
from skyctl.planner.verification.hybrid_bound_proof import prove_hybrid
from skyctl.planner.verification.hybrid_step import CheckedHybrid
from skyctl.planner.verification.pipeline_checks import (
    Rows,
    check_memory,
    check_pins,
    check_prediction,
    check_ties,
    chunk_bytes_of,
    read_groups,
    read_rows,
)
from skyctl.planner.verification.verdict import (
    Check,
    check_bound,
    check_certificate,
    check_unused,
    check_value,
)
from skyctl.records.plan import Plan
from skyctl.records.problem import Problem


def check_hybrid_plan(problem: Problem, plan: Plan) -> list[Check]:
    """Every check of a plan whose pipelines have cuts of their own; fewer where it can't be read."""
    try:
        _require_hybrid(problem)
        rows = read_rows(problem, plan)
        _require_whole(problem, plan, rows)
        step = CheckedHybrid(problem)
        assert plan.sync is not None
        groups = read_groups(step, plan.sync, rows)
    except InputError as exc:
        return [Check(name="pipelines", ok=False, detail=exc.message)]
    if not step.facts.finite():
        return [
            Check(name="pipelines", ok=False, detail="the problem's times or bytes are too large to add up")
        ]
    held = [one for row in rows for one in row]
    needs = [step.need_bytes(one, groups, chunk_bytes_of(plan)) for one in held]
    times = step.play(rows, groups)
    shares = " + ".join(str(row[0].microbatches) for row in rows)
    witness = plan.certificate.witness
    unproved = None if witness is None else "its witness does"
    return [
        Check(name="pipelines", ok=True, detail=f"{len(rows)} pipelines compute {shares} microbatches"),
        Check(name="routes", ok=True, detail=f"{len(groups)} groups of layers, each a ring or a star"),
        check_unused(problem, plan),
        check_pins(step, rows),
        check_ties(step, held),
        check_memory(step, held, needs),
        check_value(plan, times.iteration_s),
        check_prediction(plan, step, held, times.iteration_s, times.sync_s, times.compute_s, needs),
        check_certificate(plan),
        check_bound(plan, lambda bound_s: prove_hybrid(step, bound_s, witness), unproved),
    ]


def _require_hybrid(problem: Problem) -> None:
    """Raises InputError where the problem asks for what several pipelines do not have."""
    if problem.schedule not in ("1f1b", "sequential") or problem.objective != "iteration":
        raise InputError(f"no hybrid has schedule {problem.schedule}, objective {problem.objective}")
    if problem.sync in ("trees", "server") or problem.helpers:
        raise InputError("hybrids sum over rings and stars, without helpers")


def _require_whole(problem: Problem, plan: Plan, rows: Rows) -> None:
    """Raises InputError where the pipelines are not two or more with all of the step's microbatches."""
    if len(rows) < 2:
        raise InputError("a hybrid has two pipelines or more, the plan has one")
    total = sum(row[0].microbatches for row in rows)
    if total != problem.microbatches:
        raise InputError(f"the shares add up to {total} microbatches, the problem has {problem.microbatches}")
    if plan.sync is None:
        raise InputError("nothing says how the pipelines' gradients are summed")
    if plan.sync.uncompressed_steps != problem.sync_uncompressed_steps:
        raise InputError(
            f"{plan.sync.uncompressed_steps} steps are uncompressed, the problem says "
            f"{problem.sync_uncompressed_steps}"
        )
