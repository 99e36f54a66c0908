"""Data files beside the user's file that are shipped with it: what ``--ship`` or its ``ship`` list names.

The list is read without running the file. Names are relative to the file's folder, and nothing outside of it
is shipped. No torch here.
"""

from __future__ import annotations

import ast
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from skyctl.agent.node_cache import check_relative_path
from skyctl.errors import WorkloadError
from skyctl.workload import user_code

ANOTHER_WAY = "put it at the same absolute path on every node that needs it, and open it by that path"


def find_data_files(path: Path, named: Sequence[str] = ()) -> dict[str, Path]:
    """The data files that are shipped with the user's file → by relative name, where they are here.

    Args:
        path: the user's file; its own ``ship = [...]`` counts, too.
        named: what ``--ship`` names: files, folders (taken whole) or globs.

    Raises:
        WorkloadError: a name leads nowhere or out of the file's folder, ``ship`` is no plain list, or all
            together are over 64 MiB.
    """
    files: dict[str, Path] = {}
    for name in named:
        files |= _files_named(path.parent, name, f"--ship {name}")
    for name in listed_names(path):
        files |= _files_named(path.parent, name, f"{path.name}: ship names {name!r}")
    sizes = {name: file.stat().st_size for name, file in files.items()}
    if sum(sizes.values()) > user_code.SHIP_LIMIT_BYTES:
        largest = max(sizes, key=lambda name: sizes[name])
        count = "" if len(sizes) == 1 else f", {len(sizes)} files"
        raise WorkloadError(
            f"the data that {path.name} ships is {sum(sizes.values()) / (1 << 20):.1f} MiB{count} (the "
            f"largest: {largest}); {user_code.SHIP_LIMIT_BYTES >> 20} MiB at most are shipped",
            hint=ANOTHER_WAY,
        )
    return dict(sorted(files.items()))


def read_data_files(path: Path, named: Sequence[str] = ()) -> dict[str, bytes]:
    """The contents of the same files by relative name. Raises as ``find_data_files``, or if unreadable."""
    return {name: user_code.read_file(file) for name, file in find_data_files(path, named).items()}


def listed_names(path: Path) -> list[str]:
    """The names in the user's file's own ``ship = [...]``; [] where it has none.

    Raises:
        WorkloadError: it is not a list of texts that can be read without running the file; names the line.
    """
    names: list[str] = []
    for node in user_code.parse_module(path, user_code.read_file(path)).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if not any(isinstance(target, ast.Name) and target.id == "ship" for target in targets):
            continue
        try:
            value = ast.literal_eval(node.value)  # type: ignore[attr-defined]
        except (ValueError, TypeError, AttributeError):
            value = None
        given = [value] if isinstance(value, str) else value
        if not isinstance(given, list | tuple) or not all(isinstance(name, str) for name in given):
            raise WorkloadError(
                f"{path.name}, line {node.lineno}: ship must be a list of file names, written out: it is "
                "read without running the file",
                hint='ship = ["points.csv", "images/"]; call a variable that means something else otherwise',
            )
        names += given
    return names


def _files_named(folder: Path, name: str, who: str) -> dict[str, Path]:
    """The files that one name stands for, by relative name."""
    if not name or Path(name).is_absolute() or ".." in Path(name).parts:
        raise WorkloadError(
            f"{who}: only what is in the folder of the python file can be shipped, named relative to it",
            hint=ANOTHER_WAY,
        )
    literal = folder / name
    matches = [literal] if os.path.lexists(literal) else sorted(folder.glob(name))
    if not matches:
        raise WorkloadError(f"{who}: there is no such file in {folder}")
    files = {}
    for match in matches:
        for file in _files_in(match):
            if not file.resolve().is_relative_to(folder.resolve()):
                raise WorkloadError(
                    f"{who}: {file.relative_to(folder)} is a link that leads out of {folder}",
                    hint=ANOTHER_WAY,
                )
            relative = file.relative_to(folder).as_posix()
            _check_file(file, relative, who)
            files[relative] = file
    if not files:
        raise WorkloadError(f"{who}: the folder is empty")
    return files


def _files_in(place: Path) -> Iterator[Path]:
    """A file itself, or all files in a folder; a link to a folder as it is."""
    if not place.is_dir() or place.is_symlink():
        yield place
        return
    for inside, folders, names in os.walk(place):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        yield from (Path(inside, name) for name in folders if Path(inside, name).is_symlink())
        yield from (Path(inside, name) for name in sorted(names))


def _check_file(file: Path, relative: str, who: str) -> None:
    """Raises WorkloadError for what can't be sent: a broken link, a pipe, a link to a folder, an odd name."""
    try:
        check_relative_path(relative)
        relative.encode()
        regular = stat.S_ISREG(file.stat().st_mode)
    except (OSError, ValueError) as exc:
        raise WorkloadError(f"{who}: {relative!r} can't be shipped: {exc}") from exc
    if not regular:
        what = "a link to a folder" if file.is_dir() else "no regular file"
        raise WorkloadError(f"{who}: {relative} is {what}", hint="name files, or the folder itself")
