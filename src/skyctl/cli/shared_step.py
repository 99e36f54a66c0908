"""What is said before a run that takes turns: what a step is predicted to take next to other runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from skyctl.cli.command_output import Output

if TYPE_CHECKING:
    from skyctl.cli.run_options import LaunchOptions
    from skyctl.records.plan import Plan


def say_shared_step(out: Output, plan: Plan, options: LaunchOptions, cluster_file: Path) -> Plan:
    """Says it where runs are under way on the plan's devices; gives the plan."""
    if options.turns is None:
        return plan

    from skyctl.compare.number_format import format_seconds
    from skyctl.supervision.run_status import list_runs
    from skyctl.supervision.shared_devices import sharing_runs, step_beside

    runs, _ = list_runs(every=False)
    found = step_beside(
        plan, options.steps_wanted, options.turns, str(cluster_file.absolute()), sharing_runs(runs)
    )
    if found is not None:
        out.note(
            f"by turns ({options.turns}) with {', '.join(found.beside)} a step is predicted to take "
            f"{format_seconds(found.step_s)} while they run, alone {format_seconds(found.alone_s)}"
        )
    return plan
