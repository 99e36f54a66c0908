"""Options that would change nothing beside another one: they are refused, and never ignored in silence."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyctl.cli.command_runner import is_given
from skyctl.cli.option_values import is_plan_file
from skyctl.errors import InputError


@dataclass(frozen=True)
class UnusedOptions:
    """Parameters that do not go with one parameter of a command, and why not.

    Attributes:
        parameter: the one beside which they would change nothing.
        others: those, by parameter.
        because: goes on from what was given: "--problem FILE, which …".
        value: only where the parameter has that value; None: wherever it is given.
    """

    parameter: str
    others: Sequence[str]
    because: str
    value: object = None


UNUSED: Mapping[str, Sequence[UnusedOptions]] = {
    "plan": (
        UnusedOptions(
            "problem",
            (
                *("workload", "cluster", "limit", "profile", "from_run", "batch_size", "seed", "dtype"),
                *("lora", "data", "ship", "random_inputs", "no_compare", "no_learn", "encrypt", "backend"),
            ),
            "which says it all",
        ),
        UnusedOptions(
            "from_run",
            (
                *("limit", "profile", "batch_size", "seed", "dtype", "lora"),
                *("no_compare", "no_learn", "encrypt", "backend"),
            ),
            "which says it all",
        ),
        UnusedOptions("assign", ("strategy", "whole_blocks"), "which is taken as it is"),
    ),
    "launch": (
        UnusedOptions(
            "checkpoint_every", ("keep", "replicas", "keep_here"), "which writes no checkpoints", 0
        ),
        UnusedOptions(
            "resume", ("encrypt", "backend", "no_compare", "ship"), "which goes on as it has begun"
        ),
    ),
    "sweep": (
        UnusedOptions(
            "resume",
            (
                *("grid", "range_", "random", "from_", "seed", "optuna", "module", "metric", "mode"),
                *("stop", "grace", "per_device", "ship", "env", "stall", "dry_run"),
            ),
            "which goes on as it has begun",
        ),
        UnusedOptions("from_", ("grid", "range_", "random", "seed", "optuna"), "whose lines are the trials"),
    ),
    "probe": (
        UnusedOptions(
            "quick",
            ("refresh", "output", "plot", "links", "microbatches", "no_compare"),
            "which makes no profile and measures a few links",
        ),
    ),
}
"""By command. Two sets of options depend on more than names: those that a plan file settles (``launch PLAN``)
and those that have no meaning for ``compare --paper``. Their commands say so."""


RESUMED = (
    *("accept_new_host_keys", "timeout", "hold", "detach", "output", "yes", "dry_run"),
    *("as_json", "quiet", "verbose"),
)
"""Parameters whose defaults count beside ``launch --resume``: the run has its own of all others."""
PLANNED = (
    *("strategy", "parallel", "sync_format", "uncompressed_steps", "sync", "sync_delay", "undelayed_steps"),
    *("staleness", "helper", "pin_first", "pin_last", "microbatches", "schedule", "link_dtype", "trial"),
    *("local_steps", "owners", "prox_mu", "outer_lr", "outer_momentum", "clients_per_round"),
    *("drop_stragglers", "round_deadline", "batch_size", "seed", "dtype", "lora", "no_compare"),
)
"""Parameters whose defaults do not count beside ``launch PLAN.json``: a plan has settled them."""


PAPER_PARAMETERS = ("paper", "output", "time_limit", "as_json", "quiet", "verbose", "yes")
"""Parameters of ``compare`` that go with --paper."""


class _AllBut(frozenset[str]):
    """All names but these."""

    def __contains__(self, name: object) -> bool:
        return not super().__contains__(name)


def settled_parameters(command: str, typed: Mapping[str, Any]) -> Container[str]:
    """The parameters of which a default in a file does not count beside what was typed.

    Args:
        command: as it is typed: ``checkpoint ls``.
        typed: by parameter the text typed, or True for a flag; None: it was not typed.
    """
    given = {name for name, value in typed.items() if value is not None}
    if command == "launch" and "resume" in given:
        return _AllBut(RESUMED)
    if command == "compare" and "paper" in given:
        return _AllBut(PAPER_PARAMETERS)
    settled: set[str] = set()
    if command == "launch" and is_plan_file(str(typed.get("plan"))):
        settled.update(PLANNED)
    for rule in UNUSED.get(command, ()):
        if rule.parameter in given and (rule.value is None or str(rule.value) == typed[rule.parameter]):
            settled.update(rule.others)
        elif given.intersection(rule.others):
            settled.add(rule.parameter)
    return settled


def refuse_unused(context: Any) -> None:
    """Raises InputError for the first option, typed or of the file of defaults, that would change nothing."""
    parameters = {parameter.name: parameter for parameter in context.command.params}
    for rule in UNUSED.get(context.command.name, ()):
        value = context.params.get(rule.parameter)
        if not is_given(context, rule.parameter, in_file=True) or (
            rule.value is not None and value != rule.value
        ):
            continue
        given = f"{_flag(parameters[rule.parameter])}{'' if value is True else f' {value}'}"
        for other in rule.others:
            if is_given(context, other, in_file=True):
                flag = _flag(parameters[other])
                raise InputError(
                    f"{flag} does not go with {given}, {rule.because}", hint=f"leave {flag} out, or {given}"
                )


def _flag(parameter: Any) -> str:
    """A parameter as it is typed: an option's long name, but a usual short one."""
    if parameter.param_type_name != "option":
        return f"a {parameter.name}"
    return str(parameter.opts[0] if parameter.name == "output" else parameter.opts[-1])
