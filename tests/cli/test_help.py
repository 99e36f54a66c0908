"""Help fits a screen: options in panels, rare ones counted, and all of them behind ``--help-all``."""

from __future__ import annotations

import re
from typing import Any

import pytest
import typer

from skyctl.cli.app import app
from skyctl.cli.command_tree import commands_within
from skyctl.cli.help_panels import ADVANCED, OWN, PANELS, USUAL

from ..helpers.commands import run_here

EVERY: dict[str, Any] = dict(commands_within(typer.main.get_command(app)))
COMMANDS = {name: command for name, command in EVERY.items() if not hasattr(command, "commands")}
MOST_OPTIONS, MOST_LINES, COLUMNS = 15, 60, 100


def options(command: Any) -> list[Any]:
    return [
        option for option in command.get_params(typer.Context(command)) if option.param_type_name == "option"
    ]


def shown(text: str) -> set[str]:
    """The long names of options that stand at the beginning of a line."""
    return set(re.findall(r"^│ (--[a-z-]+)[ ,]", text, re.MULTILINE))


@pytest.fixture(autouse=True)
def _columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_a_screen(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    done = run_here(capsys, *name.split(), "--help")
    usual = {option.opts[-1] for option in options(COMMANDS[name]) if option.rich_help_panel != ADVANCED}
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) <= MOST_LINES
    assert "<bool>" not in done.stdout
    assert len(usual) <= MOST_OPTIONS
    assert len(shown(done.stdout)) == len(usual)
    rare = len(options(COMMANDS[name])) - len(usual)
    counted = [line for line in done.stdout.splitlines() if f" {rare} more options: " in line]
    assert [line.rstrip().endswith(f"skyctl {name} --help-all") for line in counted] == [True] * (rare > 0)
    assert ADVANCED not in done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_help_all_lists_every_option(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    done = run_here(capsys, *name.split(), "--help-all")
    every = {
        next(flag for flag in option.opts if flag.startswith("--")) for option in options(COMMANDS[name])
    }
    assert done.returncode == 0
    assert shown(done.stdout) == every
    assert "<bool>" not in done.stdout
    assert "more options" not in done.stdout
    assert (f"─ {ADVANCED} ─" in done.stdout) == (name in USUAL)


@pytest.mark.parametrize("name", ["", *(name for name in EVERY if name not in COMMANDS)])
def test_help_of_a_group_fits_as_well(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    done = run_here(capsys, *name.split(), "--help")
    assert len(done.stdout.splitlines()) <= MOST_LINES
    assert "<bool>" not in done.stdout


def test_a_panel_of_one_command_is_not_another_ones() -> None:
    """Options that several commands take are defined once; where they are listed is the command's own."""
    panels = {
        name: next(option.rich_help_panel for option in options(command) if "--quiet" in option.opts)
        for name, command in COMMANDS.items()
    }
    assert (panels["launch"], panels["ps"], panels["check"]) == (ADVANCED, "General", "General")


def test_advanced_is_the_last_panel(capsys: pytest.CaptureFixture[str]) -> None:
    done = run_here(capsys, "launch", "--help-all")
    titles = [
        line.split("─ ")[1].split(" ─")[0] for line in done.stdout.splitlines() if line.startswith("╭─ ")
    ]
    assert titles == ["Arguments", *(panel for panel in (OWN, *PANELS) if panel in titles), ADVANCED]


def test_what_the_tables_name_is_there() -> None:
    flags = {flag for command in COMMANDS.values() for option in options(command) for flag in option.opts}
    assert {flag for panel in PANELS.values() for flag in panel} <= flags
    for name, usual in USUAL.items():
        assert set(usual) <= {flag for option in options(COMMANDS[name]) for flag in option.opts}
