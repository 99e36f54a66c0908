"""Which files the user's code opens here that no node will have: refused before anything is measured.

Python tells of each file that is opened by an audit event. Files that a library opens by itself (in C++, or
in a DataLoader's worker process) are not heard of: those are missed on the node, by name. No torch here.
"""

from __future__ import annotations

import ast
import os
import sys
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from skyctl.errors import WorkloadError
from skyctl.workload import user_code

_CODE = (".py", ".pyc", ".pyi", ".so")
_INSTALLED = ("site-packages", "dist-packages", "__pycache__")
_NAMED_AT_MOST = 3
_noting = threading.local()
_install_lock = threading.Lock()
_installed = False


@contextmanager
def note_opened_files() -> Iterator[dict[str, bool]]:
    """Inside, what this thread opens to read is added: absolute path → whether it was given as relative."""
    _install_hook()
    before = getattr(_noting, "paths", None)
    paths: dict[str, bool] = {}
    _noting.paths = paths
    try:
        yield paths
    finally:
        _noting.paths = before


def refuse_unshipped(path: Path, opened: Mapping[str, bool], shipped: Collection[str]) -> None:
    """Refuses files beside the user's file that it has opened and no node will have.

    A file that its code names by an absolute path is left to that path: it may be there on every node.

    Args:
        path: the user's file.
        opened: as ``note_opened_files`` gives them.
        shipped: the relative names of all files that go to the nodes.

    Raises:
        WorkloadError: names the files and what to do.
    """
    folder = path.parent
    absolute = _absolute_literals(folder, shipped)
    unshipped: list[str] = []
    relative: list[str] = []
    for name, was_relative in sorted(opened.items()):
        place = Path(name)
        if place.suffix in _CODE or set(place.parts) & set(_INSTALLED) or not place.is_file():
            continue
        inside = _relative_name(place, folder)
        if inside is None:
            relative += [os.path.relpath(name)] if was_relative else []
            continue
        hidden = any(part.startswith(".") for part in Path(inside).parts)
        if (
            hidden
            or place.is_relative_to(sys.prefix)
            or any(place.is_relative_to(literal) for literal in absolute)
        ):
            continue
        if inside not in shipped:
            unshipped.append(inside)
        elif was_relative:
            relative.append(inside)
    if unshipped:
        tops = list(dict.fromkeys(_top(name) for name in unshipped))
        flags = " ".join(f"--ship {top}" for top in tops[:_NAMED_AT_MOST])
        raise WorkloadError(
            f"{path.name} opens {_names(unshipped)} beside it, which no node would have",
            hint=f"ship it: {flags}, or ship = {tops[:_NAMED_AT_MOST]} in {path.name}, and open it as "
            "Path(__file__).parent / NAME; or put it outside this folder, at the same absolute path on every "
            "node that needs it (where only the nodes have it: define example(batch_size))",
        )
    if relative:
        raise WorkloadError(
            f"{path.name} opens {_names(relative)} relative to the folder that skyctl was started in, and "
            "nodes start in another",
            hint="open it as Path(__file__).parent / NAME and ship it (--ship NAME), or by an absolute path "
            "that is the same on every node",
        )


def _install_hook() -> None:
    """Installs the audit hook, once: Python can't remove one. It does nothing outside of a context."""
    global _installed  # noqa: PLW0603 - the hook is the process's own
    with _install_lock:
        if not _installed:
            sys.addaudithook(_on_audit_event)
            _installed = True


def _on_audit_event(event: str, args: tuple[Any, ...]) -> None:
    if event != "open":
        return
    paths = getattr(_noting, "paths", None)
    if paths is None or not isinstance(args[0], str | bytes):
        return
    flags = args[2] if isinstance(args[2], int) else 0
    if not flags & (os.O_WRONLY | os.O_CREAT | os.O_TRUNC):
        name = os.fsdecode(args[0])
        paths.setdefault(os.path.abspath(name), not os.path.isabs(name))  # noqa: PTH100, PTH117 - no look at the disk


def _relative_name(place: Path, folder: Path) -> str | None:
    """The name of a file in the folder, as it is named or where links lead; None: it is elsewhere."""
    for path in (place, place.resolve()):
        if path.is_relative_to(folder):
            return path.relative_to(folder).as_posix()
    return None


def _absolute_literals(folder: Path, shipped: Collection[str]) -> list[Path]:
    """The absolute paths in the folder that the user's code has written out."""
    literals = []
    for name in shipped:
        if name.endswith(".py"):
            tree = user_code.parse_module(folder / name, user_code.read_file(folder / name))
            texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
            paths = [os.path.expanduser(text) for text in texts if isinstance(text, str)]  # noqa: PTH111
            literals += [Path(text) for text in paths if text.startswith("/") and "\0" not in text]
    return [place for place in literals if place.is_relative_to(folder)]


def _top(name: str) -> str:
    """The part to name of a file in a folder beside the user's file: the folder."""
    first, slash, _ = name.partition("/")
    return first + slash


def _names(names: list[str]) -> str:
    more = len(names) - _NAMED_AT_MOST
    return ", ".join(names[:_NAMED_AT_MOST]) + (f" and {more} more" if more > 0 else "")
