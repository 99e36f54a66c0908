"""What a workload requires beside torch: its ``requirements.txt``, or ``transformers`` for ``hf:``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from skyctl.errors import InputError
from skyctl.files import read_text
from skyctl.workload.workload_spec import parse_source

REQUIREMENTS_FILE = "requirements.txt"
MAX_INCLUDE_DEPTH = 10
OLDEST_TRANSFORMERS = "5.6"

_PIP_OPTION = re.compile(
    r"(--(index-url|extra-index-url|pre|prefer-binary|only-binary|no-binary|trusted-host|no-index|use-feature)\b"
    r"|-i\b)"
)
_INCLUDE = re.compile(r"(?:-r|--requirement|-c|--constraint)(?:\s+|=)(.+)")
_PLAIN = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9._-]*\s?(\[[A-Za-z0-9._, -]*\])?"  # name, extras
    r"[ 0-9A-Za-z.,<>=!~*+()]*"  # versions
    r"(;[ A-Za-z0-9._<>=!~'\"()]*)?"  # marker
)
_PACKAGE_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")


@dataclass(frozen=True)
class Requirements:
    """``lines``: one requirement each; ``options``: lines for pip itself; ``source``: what they are from."""

    lines: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    source: str | None = None


def read_workload_requirements(workload: str | None) -> Requirements:
    """What the workload as typed requires; nothing for built-in ones, or where no file lies beside it.

    Raises:
        WorkloadError: there is no such workload.
        InputError: a line that can't be had on another machine, with file and line.
    """
    if workload is None:
        return Requirements()
    source = parse_source(workload)
    if source.kind == "hf":
        return Requirements((_transformers_requirement(),), (), "hf:")
    path = source.path.parent / REQUIREMENTS_FILE if source.path is not None else None
    if path is None or not path.is_file():
        return Requirements()
    lines, options = [], []
    for where, text in _read_requirement_lines(path, 0):
        if _PIP_OPTION.match(text):
            options.append(text)
        else:
            lines.append(_check_requirement(where, text))
    return Requirements(tuple(dict.fromkeys(lines)), tuple(dict.fromkeys(options)), str(path))


def merge_requirements(new: tuple[str, ...], had: tuple[str, ...]) -> tuple[str, ...]:
    """Both; of a package that both name, what is new counts."""
    named = {_normalised_name(line) for line in new}
    return (*new, *(line for line in had if _normalised_name(line) not in named))


def is_plain_requirement(line: str) -> bool:
    """Whether a line is a package's name, with extras, versions and a marker at most.

    Of what a node says, nothing else goes to this machine's pip: an address or an option of pip's could have
    it run code.
    """
    return _PLAIN.fullmatch(line) is not None


def _normalised_name(line: str) -> str:
    found = _PACKAGE_NAME.match(line)
    return re.sub(r"[-_.]+", "-", found[0]).lower() if found else line


def _transformers_requirement() -> str:
    try:
        return f"transformers=={version('transformers')}"
    except PackageNotFoundError:
        return f"transformers>={OLDEST_TRANSFORMERS}"


def _read_requirement_lines(path: Path, depth: int) -> Iterator[tuple[str, str]]:
    """(file and line, text) of every line that says something, those of included files in their place."""
    number, joined = 0, ""
    for number, raw in enumerate(read_text(path).splitlines(), 1):
        joined += raw
        if joined.endswith("\\"):
            joined = joined[:-1]
            continue
        text, joined = re.sub(r"(^|\s)#.*$", "", joined).strip(), ""
        where = f"{path}:{number}"
        if found := _INCLUDE.fullmatch(text):
            if text.startswith(("-c", "--constraint")):
                raise InputError(
                    f"{where}: constraints files are not read by setup", hint="write the versions here"
                )
            if depth >= MAX_INCLUDE_DEPTH:
                raise InputError(
                    f"{where}: requirements files include each other more than {MAX_INCLUDE_DEPTH} deep"
                )
            yield from _read_requirement_lines(path.parent / found[1].strip(), depth + 1)
        elif text:
            yield where, text


def _check_requirement(where: str, text: str) -> str:
    if text.startswith(("-e", "--editable", ".", "/", "~", "file:")) or "@ file:" in text:
        raise InputError(
            f"{where}: {text!r} lies on this machine, where nodes can't get it",
            hint="modules beside the workload's file go along by themselves; else make a wheel: --wheels",
        )
    if text.startswith("-"):
        raise InputError(f"{where}: setup does not know the option {text.split(maxsplit=1)[0]!r}")
    if _PACKAGE_NAME.match(text) is None or re.match(r"[a-z+]+://", text):
        raise InputError(f"{where}: {text!r} is no requirement", hint="as in: NAME>=1.2, or NAME @ https://…")
    return text
