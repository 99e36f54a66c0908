"""The commands that reproduce a comparison, with nothing in them that tells whose machine it was."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from skyctl.cli.command_runner import is_given

if TYPE_CHECKING:
    import typer

    from skyctl.compare.outcome import StrategyOutcome
    from skyctl.compare.report_data import Reproduction
    from skyctl.control.training_request import TrainingRequest
    from skyctl.records.profile import Profile

OMITTED_FLAGS = {"-o", "-y", "-q", "-v", "--json", "--profile", "--timeout", "--accept-new-host-keys"}
"""Options that change no figure, or name a file of this machine."""
PATH_FLAGS = {"-c", "--data"}
"""Options of which only the file's own name is shown."""


def anonymize_command(context: typer.Context) -> str:
    """The command as it was typed, without what concerns this machine alone."""
    from skyctl.control.report_builder import anonymize_workload

    words, arguments = ["skyctl", str(context.info_name)], []
    for parameter in context.command.params:
        name, flag = str(parameter.name), parameter.opts[0]
        value = context.params.get(name)
        if value is None or not is_given(context, name):
            continue
        if parameter.param_type_name == "argument":
            arguments.append(anonymize_workload(str(value)))
        elif flag not in OMITTED_FLAGS and value is not False:
            for item in value if isinstance(value, list | tuple) else [value]:
                text = Path(str(item)).name if flag in PATH_FLAGS else str(item)
                words += [flag] if item is True else [flag, text]
    return shlex.join([*words[:2], *arguments, *words[2:]])


def describe_reproduction(
    context: typer.Context,
    request: TrainingRequest,
    profile: Profile,
    outcomes: Sequence[StrategyOutcome],
    *,
    steps: int | None,
    cluster_file: str | None,
) -> Reproduction:
    """How to reproduce the report's figures: the comparison, its certificate, one of its runs.

    Args:
        steps: those that were trained; None: nothing was run.
        cluster_file: the cluster file's name; None: there is none (the demo's cluster is made up).
    """
    from skyctl.compare.comparison import pick_best_row
    from skyctl.compare.outcome import summarize_outcomes
    from skyctl.compare.report_data import Reproduction
    from skyctl.control.report_builder import versions

    where = "" if cluster_file is None else f", next to {cluster_file}"
    commands = [(f"The whole comparison{where}:", anonymize_command(context))]
    certified = [
        outcome.strategy
        for outcome in outcomes
        if outcome.plan is not None and outcome.plan.certificate.lower_bound_s is not None
    ]
    if certified:
        verify = f"skyctl verify {certified[-1]}.plan.json"
        commands.append(("The certificate, checked without the solver that made it:", verify))
    best = pick_best_row(summarize_outcomes(outcomes))
    if best is not None and cluster_file is not None:
        cluster = [] if cluster_file == "cluster.yaml" else ["-c", cluster_file]
        words = ["skyctl", "launch", f"{best.strategy}.plan.json", "--steps", str(steps or 10), *cluster]
        commands.append((f"The plan of {best.strategy} by itself:", shlex.join(words)))
    spec = request.spec
    facts = [
        *versions(profile),
        ("seed", f"{spec.seed} (of initial weights and data)"),
        ("batch", f"{spec.batch_size} samples a step, {spec.dtype}"),
    ]
    if spec.learning_rate is not None:
        facts.append(("learning rate", f"{spec.learning_rate:g}"))
    if cluster_file is not None:
        facts.append(("cluster file", cluster_file))
    return Reproduction(tuple(commands), tuple(facts))
