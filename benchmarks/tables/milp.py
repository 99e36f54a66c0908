"""The published MILP under CBC and under CP-SAT: what they reach in a limit, against the proved optimum."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from baselines.sky import two_stages
from baselines.sky_milp import GAP, SOLVERS, published_milp
from baselines.weights import even

from skyctl import plan
from tables.instances import published_case
from tables.page import Table, markdown, seconds

SIZES = ((4, 10), (8, 10), (8, 20))
"""Devices × encoders: 4 × 33, 8 × 33 and 8 × 63 layers."""


def milp(limit_s: float) -> Iterator[Table]:
    """Both solvers on each size, and the published heuristic and the even split beside them."""
    from tables.timing import warm_up

    warm_up()
    rows = [_row(count, encoders, limit_s) for count, encoders in SIZES]
    yield Table(
        {"table": "milp", "limit_s": limit_s, "relative_gap": GAP, "rows": rows}, _text(rows, limit_s)
    )


def _row(count: int, encoders: int, limit_s: float) -> dict[str, Any]:
    problem = published_case(count, encoders)
    began = time.perf_counter()
    proof = plan(problem).certificate
    wall = time.perf_counter() - began
    best = proof.lower_bound_s or proof.value_s
    row: dict[str, Any] = {
        "size": f"{count} × {len(problem.layers)}",
        "optimal": {"status": proof.status, "value_s": proof.value_s, "wall_s": wall},
        "even": plan(problem, assign=even(problem)).certificate.value_s / best,
        "two_stage": plan(problem, assign=two_stages(problem)).certificate.value_s / best,
    }
    for solver in SOLVERS:
        found = published_milp(problem, solver, limit_s)
        value = None
        if found.assignment is not None:
            value = plan(problem, assign=found.assignment).certificate.value_s / best
        row[solver] = {
            "status": found.status,
            "ratio": value,
            "bound_ratio": None if found.bound_s is None else found.bound_s / best,
            "wall_s": found.wall_s,
        }
    return row


def _text(rows: list[dict[str, Any]], limit_s: float) -> str:
    head = ["devices × layers", "even", "two-stage", "MILP, CBC", "MILP, CP-SAT", "skyctl optimal"]
    body = []
    for row in rows:
        ours = row["optimal"]
        body.append(
            [
                row["size"],
                f"{row['even']:.3f}",
                f"{row['two_stage']:.3f}",
                *(_cell(row[solver]) for solver in SOLVERS),
                f"1, {ours['status']}, {seconds(ours['wall_s'])}",
            ]
        )
    return (
        f"Value ÷ proved optimum. MILPs: relative gap {GAP}, one thread, limit {limit_s:g} s; in brackets "
        f"the solver's own lower bound ÷ optimum. Slowdowns `1 + default_rng(35).integers(1, 7)`.\n\n"
        f"{markdown(head, body)}"
    )


def _cell(found: dict[str, Any]) -> str:
    if found["ratio"] is None:
        return f"{found['status']}, {seconds(found['wall_s'])}"
    bound = "" if found["bound_ratio"] is None else f" [{found['bound_ratio']:.2f}]"
    return f"{found['ratio']:.3f}{bound}, {found['status']}, {seconds(found['wall_s'])}"
