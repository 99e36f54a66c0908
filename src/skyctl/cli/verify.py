"""``skyctl verify``: re-check a plan and its certificate without the solver that made it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from skyctl.cli.common import Output, command


@command
def verify(
    out: Output,
    plan: Annotated[Path, typer.Argument(metavar="PLAN.json", help="A plan file.")],
) -> int | None:
    """Re-check a plan and its certificate; exit 1 where they do not hold."""
    from skyctl.files import read_record
    from skyctl.planner.api import verify as check
    from skyctl.records.plan import Plan

    made = read_record(Plan, plan)
    verdict = check(made.problem, made)
    for item in verdict.checks:
        mark = ("✓" if item.ok else "✗") if item.checked else "–"
        out.line(f"{mark} {item.name}: {item.detail}" + ("" if item.checked else " (not checked)"))
    unchecked = [item.name for item in verdict.checks if not item.checked]
    if not verdict.ok:
        out.line("the plan or its certificate does not hold")
    elif unchecked:
        out.line(f"what could be checked holds; not checked: {', '.join(unchecked)}")
    else:
        out.line("the plan and its certificate hold")
    out.json(verdict)
    return None if verdict.ok else 1
