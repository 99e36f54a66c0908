"""The commands that the documents show, and skyctl's own parser to try them with."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from skyctl.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SHELLS = ("", "console", "sh", "bash", "shell")
OURS = ("skyctl", "make", "python", ".venv/bin/python", ".venv/bin/skyctl")
_NEEDS = re.compile(r"<!--\s*needs:\s*(.+?)\s*-->")
_FENCE = re.compile(r"^\s*(`{3,}|~{3,})\s*(\w*)")


@dataclass(frozen=True)
class Shown:
    """A command of a document. ``needs``: what the comment above its block says that it needs, or None."""

    page: str
    line: int
    words: tuple[str, ...]
    needs: str | None

    @property
    def text(self) -> str:
        """The command as one line, without comments and superfluous blanks."""
        return shlex.join(self.words)

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"


def shown() -> list[Shown]:
    """Every command in a shell block of README, CONTRIBUTING and ``docs/``."""
    return [command for page in PAGES for command in _in_page(page)]


def _in_page(page: Path) -> Iterator[Shown]:
    lines = page.read_text(encoding="utf-8").splitlines()
    name = str(page.relative_to(ROOT))
    at, needs = 0, None
    while at < len(lines):
        fence = _FENCE.match(lines[at])
        if fence is None:
            found = _NEEDS.search(lines[at])
            if found or lines[at].strip():
                needs = found[1] if found else None
            at += 1
            continue
        end = next(
            (i for i in range(at + 1, len(lines)) if lines[i].strip().startswith(fence[1])), len(lines) - 1
        )
        if fence[2] in SHELLS:
            for number, words in _in_block(lines[at + 1 : end]):
                yield Shown(name, at + 2 + number, words, needs)
        at, needs = end + 1, None


def _in_block(lines: list[str]) -> Iterator[tuple[int, tuple[str, ...]]]:
    """(line, words) of commands: behind ``$`` where there are such lines, else all that begin so."""
    prompts = any(line.startswith("$ ") for line in lines)
    at = 0
    while at < len(lines):
        first, line = at, lines[at]
        while line.endswith("\\") and at + 1 < len(lines):
            at += 1
            line = f"{line[:-1]} {lines[at].strip()}"
        at += 1
        if prompts and not line.startswith("$ "):
            continue
        for part in re.split(r"\s&&\s|;\s", line.removeprefix("$ ")):
            try:
                words = tuple(shlex.split(part, comments=True))
            except ValueError:
                continue
            if words and words[0] in OURS:
                yield first, words


def inline() -> list[Shown]:
    """Every ``skyctl …`` in the text itself; only names of commands and options mean something there."""
    found = []
    for page in PAGES:
        fenced = False
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            fenced ^= _FENCE.match(line) is not None
            for text in [] if fenced else re.findall(r"`(skyctl [^`]+)`", line):
                found.append(Shown(str(page.relative_to(ROOT)), number, tuple(text.split()), None))
    return found


@functools.cache
def _whole() -> Any:
    return typer.main.get_command(app)


def command_of(words: tuple[str, ...]) -> tuple[str, Any, list[str]]:
    """(``checkpoint ls``, its parser, the words behind it). Raises ValueError where there is none."""
    command = _whole()
    rest = list(words)
    names = []
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        if rest[0] not in command.commands:
            raise ValueError(f"there is no command {rest[0]!r}")
        command = command.commands[rest[0]]
        names.append(rest.pop(0))
    return " ".join(names), command, rest


def parse(words: tuple[str, ...]) -> None:
    """Has skyctl's own parser take ``skyctl WORDS`` apart; nothing is done. Raises ValueError."""
    name, command, rest = command_of(words)
    known = {option for parameter in command.params for option in parameter.opts} | {"-h", "--help"}
    if not name or (rest and rest[0] in ("-h", "--help", "--help-all")):
        unknown = [word for word in rest if word.startswith("-") and word not in known]
        if unknown or not rest:
            raise ValueError(f"{unknown or 'nothing'} is no option of {name or 'skyctl'}")
        return
    try:
        command.make_context(name, rest)
    except (Exception, SystemExit) as exc:  # the parser's own errors, which typer does not export, or ours
        raise ValueError(getattr(exc, "message", None) or str(exc) or type(exc).__name__) from exc


def options_of(command: Any) -> set[str]:
    """Every spelling of every option of a command."""
    return {
        option
        for parameter in command.params
        for option in (*parameter.opts, *parameter.secondary_opts)
        if option.startswith("-")
    } | {"-h", "--help"}
