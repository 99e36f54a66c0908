"""The commands that make a comparison again, with nothing in them that says whose machine it was."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

    from skyctl.compare.report.facts import Again
    from skyctl.compare.rows import Outcome
    from skyctl.control.request import Request
    from skyctl.records.profile import Profile

SAID_ELSEWHERE = {"-o", "-y", "-q", "-v", "--json", "--profile", "--timeout", "--accept-new-host-keys"}
"""What changes nothing of the figures, or names a file of this machine."""
PATHS = {"-c", "--data"}
"""Of what these name the last part is enough."""


def typed(context: typer.Context) -> str:
    """The command as it was typed, without what belongs to this machine alone."""
    from skyctl.control.reporting import public_workload

    words, arguments = ["skyctl", str(context.info_name)], []
    for parameter in context.command.params:
        name, flag = str(parameter.name), parameter.opts[0]
        value = context.params.get(name)
        source = context.get_parameter_source(name)
        if value is None or source is None or source.name != "COMMANDLINE":
            continue
        if parameter.param_type_name == "argument":
            arguments.append(public_workload(str(value)))
        elif flag not in SAID_ELSEWHERE and value is not False:
            for one in value if isinstance(value, list | tuple) else [value]:
                words += [flag] if one is True else [flag, Path(str(one)).name if flag in PATHS else str(one)]
    return shlex.join([*words[:2], *arguments, *words[2:]])


def again(
    context: typer.Context,
    request: Request,
    profile: Profile,
    outcomes: Sequence[Outcome],
    *,
    steps: int | None,
    cluster_file: str | None,
) -> Again:
    """How to get the report's figures again: the comparison, the proof, one of its runs.

    Args:
        steps: how many were trained; None: nothing was run.
        cluster_file: its name; None: there is none (the demo's cluster is made up).
    """
    from skyctl.compare.report.facts import Again
    from skyctl.compare.rows import rows
    from skyctl.compare.verdict import best_of
    from skyctl.control.reporting import versions

    commands = [
        (
            "The whole comparison:"
            if cluster_file is None
            else f"The whole comparison, beside {cluster_file}:",
            typed(context),
        )
    ]
    sure = [
        o.strategy for o in outcomes if o.plan is not None and o.plan.certificate.lower_bound_s is not None
    ]
    if sure:
        commands.append(
            (
                "The certificate, checked without the solver that made it:",
                f"skyctl verify {sure[-1]}.plan.json",
            )
        )
    best = best_of(rows(outcomes))
    if best is not None and cluster_file is not None:
        where = [] if cluster_file == "cluster.yaml" else ["-c", cluster_file]
        words = ["skyctl", "launch", f"{best.strategy}.plan.json", "--steps", str(steps or 10), *where]
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
    return Again(tuple(commands), tuple(facts))
