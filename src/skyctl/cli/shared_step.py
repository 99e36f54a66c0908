"""Messages about a step next to runs that take turns on the same devices."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from skyctl.cli.command_output import Output

if TYPE_CHECKING:
    from skyctl.files import RunPaths
    from skyctl.records.plan import Plan
    from skyctl.run.journal import Journal
    from skyctl.supervision.shared_devices import SharedStep

SHARED_STEP = "shared_step"
"""Its name among a run's settings."""


def say_shared_step(
    out: Output, plan: Plan, steps: int, turns: str | None, cluster_file: Path
) -> SharedStep | None:
    """Says and gives it where runs are under way on the plan's devices.

    Args:
        steps: how many it is to make.
        turns: its policy, as the option has it; None: it takes turns as they do.
    """
    from skyctl.compare.number_format import format_seconds
    from skyctl.supervision.run_status import list_runs
    from skyctl.supervision.shared_devices import sharing_runs, step_beside

    runs, _ = list_runs(every=False)
    found = step_beside(plan, steps, turns, str(cluster_file.absolute()), sharing_runs(runs))
    if found is None:
        return None
    others = f"by turns ({found.turns}) with {', '.join(found.beside)}"
    if found.step_s is None:
        out.note(f"{others} it is not known what a step takes while they run")
    else:
        out.note(
            f"{others} a step is predicted to take {format_seconds(found.step_s)} while they run, "
            f"alone {format_seconds(found.alone_s)}"
        )
    return found


def keep_shared_step(journal: Journal, found: SharedStep) -> None:
    """Writes it down for the run's end."""
    journal.update(order={**journal.state.order, SHARED_STEP: asdict(found)})


def show_shared_step(out: Output, paths: RunPaths) -> None:
    """Says it again where a run has ended, next to what was measured; nothing where none is kept."""
    from skyctl.compare.number_format import format_seconds
    from skyctl.files import read_record
    from skyctl.records.run_state import RunState

    found = read_record(RunState, paths.state).order.get(SHARED_STEP)
    if isinstance(found, dict) and found["step_s"] is not None:
        out.line(
            f"next to {', '.join(found['beside'])} a step was predicted to take "
            f"{format_seconds(found['step_s'])} while they run: the measured one is of all steps, and the "
            "prediction above is of a run alone"
        )
