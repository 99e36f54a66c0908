"""``skyctl verify``: re-check a plan and its certificate without the solver that made it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skyctl.cli.command_output import Output
from skyctl.cli.command_runner import command

if TYPE_CHECKING:
    from skyctl.planner.verification.verdict import Verdict


@command
def verify(
    out: Output,
    plan: Annotated[Path, typer.Argument(metavar="PLAN.json", help="A plan file.")],
) -> int | None:
    """Re-check a plan and its certificate; exit 1 where they do not hold."""
    from skyctl.files import read_record
    from skyctl.planner.api import verify as verify_plan
    from skyctl.records.plan import Plan

    record = read_record(Plan, plan)
    verdict = verify_plan(record.problem, record)
    for check in verdict.checks:
        mark = ("✓" if check.ok else "✗") if check.checked else "–"
        out.line(f"{mark} {check.name}: {check.detail}" + ("" if check.checked else " (not checked)"))
    out.line(_summary(verdict))
    out.json(verdict)
    return None if verdict.ok else 1


def _summary(verdict: Verdict) -> str:
    """A sentence that sums up all checks of a plan."""
    unchecked = [check.name for check in verdict.checks if not check.checked]
    if not verdict.ok:
        return "the plan or its certificate does not hold"
    if unchecked:
        return f"what could be checked holds; not checked: {', '.join(unchecked)}"
    return "the plan and its certificate hold"
