"""The files that are sent with a script: its folder, but what ignore files name.

``.gitignore`` and ``.skyctlignore`` count in every folder, with git's rules (``pathspec``).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from pathspec import GitIgnoreSpec

from skyctl.errors import InputError
from skyctl.files import home
from skyctl.workload.user_code import SHIP_LIMIT_BYTES, read_file

IGNORE_FILES = (".gitignore", ".skyctlignore")
ALWAYS_IGNORED = (
    ".git/",
    ".hg/",
    ".svn/",
    "__pycache__/",
    "*.pyc",
    ".venv/",
    ".mypy_cache/",
    ".pytest_cache/",
    ".ruff_cache/",
    ".ipynb_checkpoints/",
    "node_modules/",
)
ENVIRONMENT_FILE = "pyvenv.cfg"
"""A folder that has it is a virtual environment, and is left out."""
MOST_FILES = 20_000
_HINT = (
    "name what is not to be sent in .skyctlignore (as in .gitignore), or work in a folder that the nodes "
    "have: --workdir DIR"
)


def find_script_files(folder: Path, named: Sequence[str] = (), *, left_out: Path | None = None) -> list[Path]:
    """The files to send, in the order of their paths.

    Args:
        folder: the script's, absolute.
        named: only these files and folders of it; none: all of it, but what is ignored.
        left_out: a folder within it that is not sent: where output comes home to.

    Raises:
        InputError: a name leads nowhere or out of the folder, or there is too much; the largest are named.
    """
    if named:
        paths = list(_named_files(folder, named))
    else:
        paths = []
        for path in _walk(folder, left_out):
            paths.append(path)
            if len(paths) > MOST_FILES:
                raise InputError(f"{folder} has more than {MOST_FILES} files to send", hint=_HINT)
    sizes = {path: path.stat().st_size for path in paths}
    total = sum(sizes.values())
    if total > SHIP_LIMIT_BYTES:
        largest = sorted(paths, key=lambda path: -sizes[path])[:3]
        names = ", ".join(f"{path.relative_to(folder)} ({sizes[path] / 2**20:.1f} MiB)" for path in largest)
        raise InputError(
            f"the files of {folder} are {total / 2**20:.1f} MiB, the largest {names}; "
            f"{SHIP_LIMIT_BYTES >> 20} MiB at most are sent",
            hint=_HINT,
        )
    return sorted(paths)


def is_always_ignored(name: str) -> bool:
    """Whether a file of that relative path is one that no ignore file has to name: bytecode, a cache."""
    return GitIgnoreSpec.from_lines(ALWAYS_IGNORED).match_file(name)


def read_script_files(folder: Path, files: Sequence[Path]) -> dict[str, bytes]:
    """The files' contents, by their paths in the folder. Raises WorkloadError for one that can't be read."""
    return {path.relative_to(folder).as_posix(): read_file(path) for path in files}


def _named_files(folder: Path, named: Sequence[str]) -> Iterator[Path]:
    for name in named:
        path = Path(os.path.abspath(folder / name))  # noqa: PTH100 - links stay what they are
        if not path.is_relative_to(folder):
            raise InputError(f"--ship {name}: only what is in {folder} can be sent")
        if path.is_dir():
            yield from _walk(path, None)
        elif path.is_file():
            yield path
        else:
            raise InputError(f"--ship {name}: there is no such file in {folder}")


def _walk(top: Path, left_out: Path | None) -> Iterator[Path]:
    """The regular files under a folder that nothing ignores; no link is followed that leads out of it."""
    everywhere = GitIgnoreSpec.from_lines(ALWAYS_IGNORED)
    rules: dict[Path, GitIgnoreSpec] = {}
    skipped = {path for path in (left_out, home()) if path is not None}
    real_top = top.resolve()
    for inside, folders, names in os.walk(top):
        here = Path(inside)
        lines = [line for name in IGNORE_FILES for line in _lines(here / name)]
        if lines:
            rules[here] = GitIgnoreSpec.from_lines(lines)

        def ignored(path: Path, *, is_folder: bool = False) -> bool:
            end = "/" if is_folder else ""
            if everywhere.match_file(f"{path.name}{end}"):
                return True
            above = [folder for folder in (*path.parents,) if folder in rules]
            for folder in above:  # the nearest that says something decides
                verdict = rules[folder].check_file(f"{path.relative_to(folder).as_posix()}{end}").include
                if verdict is not None:
                    return verdict
            return False

        folders[:] = sorted(
            name
            for name in folders
            if not (here / name).is_symlink()
            and here / name not in skipped
            and not ignored(here / name, is_folder=True)
            and not (here / name / ENVIRONMENT_FILE).is_file()
        )
        for name in sorted(names):
            path = here / name
            if not path.is_file() or ignored(path):
                continue
            if path.is_symlink() and not path.resolve().is_relative_to(real_top):
                continue
            yield path


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
