"""Options that are defined once: groups as typer's parameters, and the common ones alike in every command."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from skyctl.cli.app import app
from skyctl.cli.command_output import Output
from skyctl.cli.command_runner import command
from skyctl.cli.options import ClusterOptions, DefaultedWorkloadOptions, WorkloadOptions

COMMON = ("--cluster", "--limit", "--dry-run", "--yes", "--json", "--quiet", "--verbose", "--timeout")


@dataclass(frozen=True, kw_only=True)
class Size:
    width: Annotated[int, typer.Option("-w", "--width", min=1, help="How wide.")] = 3
    names: Annotated[list[str] | None, typer.Option("--name")] = None


@dataclass(frozen=True, kw_only=True)
class Box(Size):
    height: Annotated[int, typer.Option("--height")] = 4


@command
def draw(out: Output, title: str, deep: bool = False, *, box: Box) -> None:
    """Prints its arguments."""
    out.line(f"{title} {deep} {box.width}x{box.height} {box.names}")


def run(*arguments: str) -> tuple[int, str]:
    small = typer.Typer()
    small.command()(draw)
    done = CliRunner().invoke(small, arguments)
    return done.exit_code, done.output


def test_a_group_of_options_is_a_parameter_each() -> None:
    assert run("t") == (0, "t False 3x4 None\n")
    typed = run("t", "-w", "5", "--height", "6", "--name", "a", "--name", "b", "--deep")
    assert typed == (0, "t True 5x6 ['a', 'b']\n")
    code, output = run("t", "-w", "0")
    assert code == 2
    assert "--width" in output
    assert "How wide." in run("--help")[1]


def test_two_groups_with_one_option_are_a_mistake_at_import() -> None:
    with pytest.raises(ValueError, match="duplicate parameter name: 'width'"):

        @command
        def wrong(out: Output, *, size: Size, box: Box) -> None:
            """Both groups have a width."""


def commands(group: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    group = group or get_command(app)
    for name, inner in group.commands.items():
        if getattr(inner, "commands", None) is None:
            yield " ".join((*path, name)), inner
        else:
            yield from commands(inner, (*path, name))


@pytest.mark.parametrize("flag", COMMON)
def test_a_common_option_is_the_same_in_every_command(flag: str) -> None:
    by_command = {
        name: (option.opts, option.help, option.metavar, option.default, option.envvar)
        for name, inner in commands()
        for option in inner.params
        if flag in option.opts
    }
    assert len(by_command) > 3
    assert len({str(option) for option in by_command.values()}) == 1, by_command


def test_the_next_command_gets_the_same_cluster() -> None:
    options = ClusterOptions(cluster=Path("my lab/cluster.yaml"), limit="!tower")
    assert options.format_arguments(["plan.json"]) == "plan.json -c 'my lab/cluster.yaml'"
    assert options.format_arguments(["x"], limited=True).endswith(" --limit '!tower'")
    assert ClusterOptions().format_arguments(["x"], limited=True) == "x"


def test_what_is_not_given_has_the_same_defaults() -> None:
    source = "gpt:layers=1,hidden=8,heads=1,context=4"
    spec = DefaultedWorkloadOptions().make_request(source, microbatches=None)[0].spec
    assert WorkloadOptions().make_request(source, microbatches=None)[0].spec == spec
    assert (spec.batch_size, spec.seed, spec.dtype) == (32, 0, "float32")
