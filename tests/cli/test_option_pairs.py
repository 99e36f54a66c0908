"""Options that change nothing beside another one are refused, all pairs of them, before anything is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import typer

from skyctl.cli.app import app
from skyctl.cli.option_pairs import UNUSED, UnusedOptions

Run = Callable[..., tuple[int, str, str]]
PARAMETERS: dict[str, dict[str, Any]] = {
    name: {parameter.name: parameter for parameter in command.params}
    for name, command in typer.main.get_command(app).commands.items()  # type: ignore[attr-defined]
}
PAIRS = [(name, rule, other) for name, rules in UNUSED.items() for rule in rules for other in rule.others]


def typed(command: str, name: str, value: object = None) -> list[str]:
    """A parameter as somebody types it."""
    parameter = PARAMETERS[command][name]
    words = ["gpt:layers=2"] if parameter.param_type_name == "argument" else [parameter.opts[-1]]
    if parameter.param_type_name == "option" and not parameter.is_flag:
        words.append(str(4 if value is None else value))
    return words


@pytest.mark.parametrize(("command", "rule", "other"), PAIRS)
def test_what_would_be_ignored_is_refused(skyctl: Run, command: str, rule: UnusedOptions, other: str) -> None:
    code, _, err = skyctl(command, *typed(command, rule.parameter, rule.value), *typed(command, other))
    assert code == 2
    assert rule.because in err
    assert "does not go with" in err


def test_where_it_depends_on_the_value_others_go(skyctl: Run) -> None:
    words = ("launch", "missing.json", "--checkpoint-every", "4", "--keep", "3")
    code, _, err = skyctl(*words)
    assert code == 2
    assert "there is no file missing.json" in err


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("-c", "x", "launch"), " launch -c x"),
        (("--cluster=x", "launch", "plan.json"), " launch --cluster=x plan.json"),
        (("--limit", "a b", "probe", "w.py"), " probe --limit 'a b' w.py"),
    ],
)
def test_options_before_the_command_are_shown_after_it(skyctl: Run, words: Any, meant: str) -> None:
    code, _, err = skyctl(*words)
    assert code == 2
    assert "options stand after the command: " in err
    assert f"{meant}\n" in err


def test_an_option_of_no_command_before_it(skyctl: Run) -> None:
    code, _, err = skyctl("--nonsense", "launch")
    assert code == 2
    assert "itself has no option --nonsense" in err
