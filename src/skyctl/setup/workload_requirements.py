"""A workload's requirements beside torch: by a file that lies beside it; for ``hf:`` ``transformers``, and
``peft`` if this machine has it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from skyctl.errors import InputError
from skyctl.files import read_text
from skyctl.workload.workload_spec import parse_source

REQUIREMENTS_FILE = "requirements.txt"
PROJECT_FILE = "pyproject.toml"
MAX_INCLUDE_DEPTH = 10
OLDEST_TRANSFORMERS = "5.6"

_PIP_OPTION = re.compile(
    r"(--(index-url|extra-index-url|pre|prefer-binary|only-binary|no-binary|trusted-host|no-index|use-feature)\b"
    r"|-i\b)"
)
_INCLUDE = re.compile(r"(?:-r|--requirement|-c|--constraint)(?:\s+|=)(.+)")


@dataclass(frozen=True)
class Requirements:
    """The requirements that are to be installed.

    Attributes:
        lines: one requirement each.
        options: lines for the installer itself.
        source: what they are from.
        notes: what people are told of how they were read.
    """

    lines: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    source: str | None = None
    notes: tuple[str, ...] = ()


def read_workload_requirements(workload: str | None) -> Requirements:
    """The requirements of the workload as typed; none for built-in ones, or if no file lies beside it.

    That is its ``requirements.txt``, else the ``project.dependencies`` of its ``pyproject.toml``.

    Raises:
        WorkloadError: there is no such workload.
        InputError: a line that can't be had on another machine, with its file.
    """
    if workload is None:
        return Requirements()
    source = parse_source(workload)
    if source.kind == "hf":
        return Requirements(_hub_requirements(), (), "hf:")
    if source.path is None:
        return Requirements()
    listed, project = source.path.parent / REQUIREMENTS_FILE, source.path.parent / PROJECT_FILE
    if listed.is_file():
        return _read_requirements_file(listed, beside=project)
    return _read_project(project) if project.is_file() else Requirements()


def _read_requirements_file(path: Path, beside: Path) -> Requirements:
    lines, options = [], []
    for where, text in _read_requirement_lines(path, 0):
        if _PIP_OPTION.match(text):
            options.append(text)
        else:
            lines.append(_check_requirement(where, text))
    note = f"requirements are read from {path}" + (f", not from {beside.name}" if beside.is_file() else "")
    return Requirements(tuple(dict.fromkeys(lines)), tuple(dict.fromkeys(options)), str(path), (note,))


def _read_project(path: Path) -> Requirements:
    """The ``project.dependencies`` of a ``pyproject.toml`` (PEP 621)."""
    try:
        found = tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as exc:
        raise InputError(f"{path} is no TOML: {exc}") from exc
    project = _table(found, "project")
    dependencies = project.get("dependencies", [])
    if not isinstance(dependencies, list) or not all(isinstance(one, str) for one in dependencies):
        raise InputError(
            f"{path}: project.dependencies has to be a list of texts",
            hint='as in: dependencies = ["NAME>=1.2"]',
        )
    if "dependencies" in project.get("dynamic", ()):
        return Requirements(
            notes=(
                f"{path} has dynamic dependencies, which setup does not read: write a {REQUIREMENTS_FILE} "
                "beside it",
            )
        )
    if not dependencies:
        return Requirements(notes=(f"{path} names no project.dependencies, so nothing is required by it",))
    where = f"{path}: project.dependencies"
    lines = tuple(dict.fromkeys(_check_requirement(where, " ".join(one.split())) for one in dependencies))
    notes = [f"requirements are read from project.dependencies of {path}"]
    sources = _uv_sources(found)
    for line in lines:
        entry = sources.get(_canonical_name(line))
        if entry is None:
            continue
        if any(set(one) - {"index", "marker", "extra", "group"} for one in entry):
            raise InputError(
                f"{path}: tool.uv.sources says where {line!r} comes from, which nodes do not know",
                hint=f"NAME @ https://… in project.dependencies, or a {REQUIREMENTS_FILE} beside it; a "
                "folder of this machine: make a wheel, and give --wheels",
            )
        notes.append(f"{line}: its index in tool.uv.sources is not read; give --extra-index-url")
    return Requirements(lines, (), str(path), tuple(notes))


def _uv_sources(document: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """By package, the entries of ``tool.uv.sources``: one, or one for each marker."""
    sources = _table(_table(_table(document, "tool"), "uv"), "sources")
    listed = {name: entry if isinstance(entry, list) else [entry] for name, entry in sources.items()}
    return {
        canonicalize_name(name): [one for one in entry if isinstance(one, dict)]
        for name, entry in listed.items()
    }


def _table(within: dict[str, Any], name: str) -> dict[str, Any]:
    found = within.get(name)
    return found if isinstance(found, dict) else {}


def merge_requirements(new: tuple[str, ...], had: tuple[str, ...]) -> tuple[str, ...]:
    """Both; of a package that both name, what is new counts."""
    named = set(map(_canonical_name, new))
    return (*new, *(line for line in had if _canonical_name(line) not in named))


def parse_requirement(line: str) -> Requirement:
    """A line of a requirements file, without its hashes. Raises InvalidRequirement (a ValueError)."""
    return Requirement(line.partition(" --")[0])


def without_address(line: str) -> str:
    """The line of a package that need not be fetched from the address it names."""
    found, hashes = parse_requirement(line), line.partition(" --")[1:]
    if found.url is None:
        return line
    found.url = None
    return str(found) + "".join(hashes)


def is_plain_requirement(line: str) -> bool:
    """Whether a line is a package's name, with extras, versions and a marker at most.

    Of what a node says, nothing else goes to this machine's uv: an address could have it run code.
    """
    try:
        return Requirement(line).url is None
    except InvalidRequirement:
        return False


def _canonical_name(line: str) -> str:
    return canonicalize_name(parse_requirement(line).name)


def _hub_requirements() -> tuple[str, ...]:
    found = []
    for package, otherwise in (("transformers", (f"transformers>={OLDEST_TRANSFORMERS}",)), ("peft", ())):
        try:
            found.append(f"{package}=={version(package)}")
        except PackageNotFoundError:
            found += otherwise
    return tuple(found)


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
    try:
        parse_requirement(text)
    except InvalidRequirement as exc:
        hint = "as in: NAME>=1.2, or NAME @ https://…"
        raise InputError(f"{where}: {text!r} is no requirement", hint=hint) from exc
    return text
