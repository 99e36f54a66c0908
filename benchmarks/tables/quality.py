"""How far from the optimum: every baseline, the heuristic and ``optimal``, on the same problems."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

from baselines import BASELINES

from skyctl import SkyctlError, plan
from skyctl.records.problem import Problem
from tables.instances import QUALITY, Suite, paper_case, quality_case
from tables.page import Table, markdown, percent, seconds

OURS = ("heuristic", "optimal")
METHODS = (*BASELINES, *OURS)
PAPER = ("f1", "f1c", "f2", "f2c", "63")


def quality_bottleneck(count: int, limit_s: float) -> Iterator[Table]:
    """The random suites, links ignored."""
    for suite in QUALITY:
        problems = [quality_case(suite, i, "bottleneck") for i in range(count)]
        yield _suite("quality", suite, problems, limit_s)
    yield _paper(limit_s)


def quality_iteration(count: int, limit_s: float) -> Iterator[Table]:
    """The same problems by the step's time, without and with links."""
    for suite in QUALITY[:3]:
        for linked in (False, True):
            problems = [quality_case(suite, i, "iteration", linked=linked) for i in range(count)]
            yield _suite("iteration", suite, problems, limit_s, ", links" if linked else ", no links")


def _suite(table: str, suite: Suite, problems: Sequence[Problem], limit_s: float, more: str = "") -> Table:
    """One suite: per method mean and worst of value ÷ optimum, or ÷ lower bound where it is not proved."""
    results = [_result(problem, limit_s) for problem in problems]
    proved = sum(result["proved"] for result in results)
    methods: dict[str, dict[str, Any]] = {}
    for name in METHODS:
        known = [r for r in results if r["value_s"][name] is not None]
        if not known:
            continue
        to_bound = [r["value_s"][name] / r["bound_s"] for r in known if r["bound_s"]]
        to_best = [r["value_s"][name] / r["best_s"] for r in known]
        methods[name] = {
            "mean": fmean(to_bound) if to_bound else None,
            "worst": max(to_bound, default=None),
            "mean_to_best": fmean(to_best),
            "worst_to_best": max(to_best),
            "none": len(results) - len(known),
            "plan_s": fmean(r["wall_s"][name] for r in known),
        }
    record = {
        "table": table,
        "suite": suite.name() + more,
        "instances": len(results),
        "seeds": f"{suite.seed}–{suite.seed + len(results) - 1}",
        "limit_s": limit_s,
        "proved": proved,
        "without_bound": sum(not r["bound_s"] for r in results),
        "worst_gap": max((r["best_s"] / r["bound_s"] - 1 for r in results if r["bound_s"]), default=None),
        "methods": methods,
    }
    return Table(record, _text(record))


def _result(problem: Problem, limit_s: float) -> dict[str, Any]:
    """Every method's value (None: it gave none that is allowed) and what is known of the optimum."""
    values: dict[str, float | None] = {}
    walls: dict[str, float] = {}
    proof = None
    for name in METHODS:
        began = time.perf_counter()
        try:
            if name in BASELINES:
                found = plan(problem, assign=BASELINES[name](problem))
            else:
                found = plan(problem, name, time_limit_s=limit_s)
        except SkyctlError:
            values[name] = None
        else:
            values[name] = found.certificate.value_s
            proof = found.certificate if name == "optimal" else None
        walls[name] = time.perf_counter() - began
    proved = proof is not None and proof.status == "optimal"
    return {
        "value_s": values,
        "wall_s": walls,
        "best_s": min(value for value in values.values() if value is not None),
        "bound_s": None if proof is None else proof.lower_bound_s,
        "proved": proved,
    }


def _text(record: dict[str, Any]) -> str:
    count, proved = record["instances"], record["proved"]
    all_proved = proved == count
    reference = "optimum" if all_proved else "optimum or bound"
    head = ["method", f"mean ÷ {reference}", "worst"]
    head += [] if all_proved else ["mean ÷ best found", "worst"]
    head += ["time", "no plan"]
    rows = []
    for name, figures in record["methods"].items():
        keys = ["mean", "worst"] + ([] if all_proved else ["mean_to_best", "worst_to_best"])
        row = [name, *(_ratio(figures[key]) for key in keys)]
        rows.append([*row, seconds(figures["plan_s"]), str(figures["none"] or "")])
    title = f"**{record['suite']}** ({count} instances, seeds {record['seeds']}): {proved} proved optimal"
    if not all_proved:
        title += (
            f" within {record['limit_s']:g} s; the others are divided by their lower bound "
            f"(widest gap {percent(record['worst_gap'])})"
        )
    if record["without_bound"]:
        title += f"; {record['without_bound']} without a bound, left out of that column"
    return f"{title}.\n\n{markdown(head, rows)}"


def _ratio(value: float | None) -> str:
    return "—" if value is None else f"{value:.3f}"


def _paper(limit_s: float) -> Table:
    """The paper's own case: value ÷ optimum for each of its four variants."""
    results = {name: _result(paper_case(name), max(limit_s, 5.0)) for name in PAPER}
    ratios = {
        method: {
            name: r["value_s"][method] / r["bound_s"] if r["value_s"][method] and r["bound_s"] else None
            for name, r in results.items()
        }
        for method in METHODS
    }
    record = {
        "table": "paper",
        "case": "64 × 483",
        "proved": {name: r["proved"] for name, r in results.items()},
        "ratios": ratios,
    }
    rows = [
        [method, *("no plan" if x is None else f"{x:.3f}" for x in row.values())]
        for method, row in ratios.items()
    ]
    marks = [name if r["proved"] else f"{name} (÷ bound)" for name, r in results.items()]
    title = (
        "**The paper's case, 64 devices × 483 layers** (seeds 32, 35, 22; `63` is f2 less its first): "
        "value ÷ optimum. No plan: it does not fit, or the rule needs memory sizes that the case leaves out."
    )
    return Table(record, f"{title}\n\n{markdown(['method', *marks], rows)}")
