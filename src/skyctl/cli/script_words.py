"""A script as it is typed after ``run`` and ``sweep``: what is to be run, and what is sent for it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skyctl.errors import InputError

if TYPE_CHECKING:
    from skyctl.records.script_request import ScriptKind

SCRIPT_SUFFIXES = (".py", ".pyc", ".pyz")


@dataclass(frozen=True, kw_only=True)
class ScriptSourceOptions:
    """Options that say what is run, what is sent for it, and when it counts as hanging."""

    module: Annotated[
        bool, typer.Option("-m", "--module", help="Run a module of this folder: python -m MODULE.")
    ] = False
    ship: Annotated[
        list[str] | None,
        typer.Option(
            "--ship",
            metavar="NAME",
            help="Send only this file or folder of this folder, repeatable; default: all of it that "
            ".gitignore and .skyctlignore leave; `skyctl run -- COMMAND` sends its program.",
        ),
    ] = None
    env: Annotated[
        list[str] | None,
        typer.Option(
            "--env", metavar="NAME=VALUE", help="A variable for every process; NAME alone: as it is here."
        ),
    ] = None
    stall: Annotated[
        float,
        typer.Option(
            "--stall",
            min=0,
            metavar="SECONDS",
            help="End a run or a trial of which no process has printed or used a processor for so long; "
            "0: never.",
        ),
    ] = 1800.0

    def kind(
        self, command: str, words: Sequence[str], *, after_dashes: bool, is_there: bool = False
    ) -> ScriptKind:
        """Whether a file, a module or a command is to be run.

        Args:
            command: which of ours is to run it.
            after_dashes: ``--`` stood before the first word.
            is_there: nodes have the file, and it need not be here.

        Raises:
            InputError: there is no such file, or nothing was given.
        """
        if not words:
            raise InputError(
                "what is to be run? give a SCRIPT, -m MODULE, or -- COMMAND",
                hint=f"skyctl {command} --help has examples",
            )
        if self.module:
            return "module"
        if after_dashes and not words[0].endswith(SCRIPT_SUFFIXES):
            return "command"
        if find_script(words[0], is_there=is_there):
            return "script"
        typed = f"skyctl {command}"
        raise InputError(
            f"{words[0]} is no Python file",
            hint=f"a module: {typed} -m {words[0]}; any other command: {typed} -- {' '.join(words)}",
        )


def find_script(word: str, *, is_there: bool = False) -> bool:
    """Whether a word is a Python file, or a folder that Python can run.

    Args:
        is_there: nodes have it, and it need not be here.

    Raises:
        InputError: it is one that is not here.
    """
    if not (word.endswith(SCRIPT_SUFFIXES) or (not is_there and Path(word).is_dir())):
        return False
    if not is_there and not Path(word).exists():
        from skyctl.workload.workload_spec import similar_files

        near = similar_files(word, ".py")
        guess = f"; did you mean {' or '.join(near)}?" if near else ""
        raise InputError(
            f"there is no script {word}{guess}",
            hint="a script that only the nodes have is run in their folder: skyctl run --workdir DIR",
        )
    return True


def shipped_words(
    kind: ScriptKind, words: Sequence[str], named: Sequence[str]
) -> tuple[Path | None, Sequence[str], Sequence[str]]:
    """The folder that is sent, the words as they are typed in a copy of it, and which files of it are meant.

    That is this folder, as Python would see it here; of a script elsewhere the script's own.

    Args:
        named: the values of ``--ship``.

    Raises:
        InputError: a program of this folder is not there.
    """
    named, here = list(named), Path.cwd()
    if kind == "command":
        program = Path(words[0])
        if not program.is_absolute() and os.sep in words[0]:  # of this folder, as a shell understands it
            if not program.is_file():
                raise InputError(f"there is no program {words[0]} in this folder")
            named.append(words[0])
        return (here if named else None), words, named
    if kind == "script":
        script = Path(words[0]).absolute()
        if not script.resolve().is_relative_to(here.resolve()):
            return script.parent, [script.name, *words[1:]], named
        words = [os.path.relpath(script, here), *words[1:]]
        named = [*named, words[0]] if named else []
    return here, words, named


def read_environment(given: Sequence[str]) -> dict[str, str]:
    """The variables of ``--env``. Raises InputError for one without a value."""
    environment = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not name or (not equals and name not in os.environ):
            raise InputError(
                f"--env {text} names no value" + ("" if equals else f", and {name} is not set here"),
                hint="--env NAME=VALUE, or --env NAME to pass on the value that it has here",
            )
        environment[name] = value if equals else os.environ[name]
    return environment
