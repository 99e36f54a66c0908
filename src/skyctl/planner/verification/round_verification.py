"""Checks of a plan of rounds: owners, shape, memory, what is averaged, and the predicted round.

Nothing is shared with ``planner/rounds``: local steps are played, and averages added up, from the records.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

from skyctl.errors import InputError
from skyctl.planner.verification.hybrid_step import CheckedHybrid, HeldRange, SummedRange
from skyctl.planner.verification.pipeline_checks import (
    Rows,
    check_memory,
    check_pins,
    check_prediction,
    check_ties,
    chunk_bytes_of,
    read_groups,
    read_rows,
    tie_exchange_s,
)
from skyctl.planner.verification.verdict import TOLERANCE, Check, check_certificate, check_unused, check_value
from skyctl.records.cluster import node_of
from skyctl.records.plan import Plan
from skyctl.records.problem import Problem

MOST_DRAWS = 20_000
"""Sets of clients that are looked at one by one; of more the median is counted."""


def check_round_plan(problem: Problem, plan: Plan) -> list[Check]:
    """Every check of a plan whose pipelines make local steps; fewer where it can't be read."""
    try:
        _require_rounds(problem)
        rows = read_rows(problem, plan)
        _require_whole(problem, plan, rows)
        step = CheckedHybrid(problem)
        groups = [] if plan.sync is None else read_groups(step, plan.sync, rows)
    except InputError as exc:
        return [Check(name="pipelines", ok=False, detail=exc.message)]
    held = [one for row in rows for one in row]
    rounded = problem.sync_format != "float32"
    kept = _copies(problem)
    copies = kept + rounded + (problem.rhythm.outer_momentum > 0)
    needs = [
        step.need_bytes(one, groups, chunk_bytes_of(plan)) + copies * _weight_bytes(step, one) for one in held
    ]
    steps = [pipeline.local_steps or 0 for pipeline in plan.pipelines]
    sync_s = _average_s(step, rows, groups, sums=2 if rounded else 1, passes=(5 if rounded else 2) + kept)
    round_s = _slowest_s(problem, step, rows, steps) + sync_s
    if _has_outer_step(problem):
        passes = 5 if problem.rhythm.outer_momentum > 0 else 3
        round_s += passes * max(_pass_s(step, one) for one in held)
    compute_s = [count * _compute_s(step, one) for count, row in zip(steps, rows, strict=True) for one in row]
    return [
        Check(name="pipelines", ok=True, detail=f"{len(rows)} pipelines make {_words(steps)} local steps"),
        _steps(problem, steps),
        _owners(problem, step, rows),
        check_unused(problem, plan),
        *([check_pins(step, rows)] if problem.owners is None else []),
        *([check_ties(step, held)] if len(rows) > 1 else []),  # one alone sums what it has cut
        check_memory(step, held, needs),
        check_value(plan, round_s),
        check_prediction(plan, step, held, round_s, sync_s, compute_s, needs),
        check_certificate(plan),
        Check(name="bound", ok=plan.certificate.lower_bound_s is None, detail="none claimed", checked=False),
    ]


def _copies(problem: Problem) -> int:
    """Whether stages keep the weights that a round began with."""
    rounded = problem.sync_format != "float32"
    compares = problem.rhythm.prox_mu > 0 or _has_outer_step(problem)
    return int(problem.owners is not None or compares or rounded)


def _has_outer_step(problem: Problem) -> bool:
    return (problem.rhythm.outer_lr, problem.rhythm.outer_momentum) != (1, 0)


def _weight_bytes(step: CheckedHybrid, one: HeldRange) -> float:
    """Of its trained weights in float32."""
    layers = step.problem.layers[one.start : one.stop]
    return math.fsum(x.state_bytes / 4 if x.gradient_bytes is None else x.gradient_bytes for x in layers)


def _words(steps: Sequence[int]) -> str:
    return " + ".join(map(str, steps)) if len(steps) <= 8 else f"{min(steps)} to {max(steps)}"


def _require_rounds(problem: Problem) -> None:
    """Raises InputError where the problem asks for what rounds do not have."""
    if problem.schedule not in ("1f1b", "sequential") or problem.objective != "iteration":
        raise InputError(f"no rounds have schedule {problem.schedule}, objective {problem.objective}")


def _require_whole(problem: Problem, plan: Plan, rows: Rows) -> None:
    """Raises InputError where shares are not the step's, or nothing says how weights are averaged."""
    shares = [row[0].microbatches for row in rows]
    wanted = problem.microbatches
    whole = sum(shares) == wanted if problem.owners is None else set(shares) == {wanted}
    if not whole:
        raise InputError(f"pipelines compute {shares} microbatches of a step's {wanted}")
    if len(rows) == 1 and plan.sync is not None:
        raise InputError("one pipeline alone has nobody to average its weights with")
    if len(rows) > 1 and (plan.sync is None or plan.sync.of != "weights"):
        raise InputError("nothing says how weights are averaged")


def _step_s(step: CheckedHybrid, row: Sequence[HeldRange]) -> float:
    """One local step: the pipeline's play, each stage's optimizer after it, ties' sums, FedProx's term."""
    done_s = max(end + step.optimizer_s(one) for end, one in zip(step.ends(row), row, strict=True))
    done_s += tie_exchange_s(step.problem, [one[:3] for one in row])
    return done_s + (max(2 * _pass_s(step, one) for one in row) if step.problem.rhythm.prox_mu > 0 else 0.0)


def _pass_s(step: CheckedHybrid, one: HeldRange) -> float:
    return step.problem.devices[one.device].reduce_byte_s * _weight_bytes(step, one)


def _compute_s(step: CheckedHybrid, one: HeldRange) -> float:
    times = step.stage_times(one)
    return one.microbatches * (times.forward_s + times.backward_s) + step.optimizer_s(one)


def _slowest_s(problem: Problem, step: CheckedHybrid, rows: Rows, steps: Sequence[int]) -> float:
    """Local work of the slowest that takes part, in the median round."""
    limit_s = problem.rhythm.round_deadline_s
    work = []
    for row, count in zip(rows, steps, strict=True):
        each_s = _step_s(step, row)
        work.append(count * each_s)
        if limit_s is not None and work[-1] > limit_s:
            started = math.ceil(limit_s / each_s * (1 - TOLERANCE))  # before the deadline
            work[-1] = max(1, started) * each_s
    clients = problem.rhythm.clients_per_round or len(work)
    if math.comb(len(work), clients) <= MOST_DRAWS:
        slowest = sorted(max(drawn) for drawn in combinations(work, clients))
        return slowest[(len(slowest) - 1) // 2]
    work.sort()
    whole = math.comb(len(work), clients)
    return next(x for i, x in enumerate(work) if 2 * math.comb(i + 1, clients) >= whole)


def _average_s(
    step: CheckedHybrid, rows: Rows, groups: Sequence[SummedRange], *, sums: int, passes: int
) -> float:
    """The busiest line, shared resource or processor, the longest way's latency, and what scaling takes.

    ``sums``: one after another; ``passes``: over the weights beside them.
    """
    if not groups:
        return 0.0
    lines: dict[object, float] = {}
    for group in groups:
        size = math.fsum(step.data.sizes[group.start : group.stop])
        for tree in group.trees:
            for edge in (*tree.up, *tree.down):
                link = step.data.links.get(edge)
                if link is not None:
                    spent_s = size * tree.share / link.bandwidth_bytes_per_s
                    lines[edge] = lines.get(edge, 0.0) + spent_s
                for number, resource in enumerate(step.problem.shared):
                    if edge in {(a, b) for a, b in resource.links}:
                        spent_s = size * tree.share / resource.bandwidth_bytes_per_s
                        lines[number] = lines.get(number, 0.0) + spent_s
    held = [one for row in rows for one in row]
    busy = [
        math.fsum(
            step.data.processor_byte_s(step.problem.devices[one.device], group.trees)
            * math.fsum(step.data.sizes[group.start : group.stop])
            for group in groups
            if one.start <= group.start < one.stop
        )
        for one in held
    ]
    latency_s = sums * max(step.data.latency_s(group.trees) for group in groups)
    return max(*lines.values(), *busy, 0.0) + latency_s + passes * max(_pass_s(step, one) for one in held)


def _steps(problem: Problem, steps: Sequence[int]) -> Check:
    asked = problem.rhythm.local_steps
    ok = True
    if isinstance(asked, tuple):
        ok = tuple(steps) == asked
    elif isinstance(asked, int):
        ok = set(steps) == {asked}
    detail = "as the problem asks for" if ok else f"the problem asks for {asked}"
    return Check(name="local steps", ok=ok, detail=detail)


def _owners(problem: Problem, step: CheckedHybrid, rows: Rows) -> Check:
    for owner, row in zip(problem.owners or (), rows, strict=False):
        for one in row:
            if node_of(step.ids[one.device]) not in owner:
                detail = f"{step.ids[one.device]} trains on the data of {'+'.join(owner)}, whose it is not"
                return Check(name="owners", ok=False, detail=detail)
    said = "no data is anybody's alone" if problem.owners is None else "each trains on its own nodes"
    return Check(name="owners", ok=True, detail=said)
