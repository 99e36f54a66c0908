"""The folder that a script's ranks work in on a node, and the files of its output folder."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from skyctl.agent.node_cache import BYTECODE_LIST, MANIFEST, check_relative_path, file_digest
from skyctl.errors import RunError
from skyctl.script.script_events import OutputFile, OutputListing
from skyctl.script.script_orders import PlaceOutput, Workplace


def enter_workplace(place: Workplace, session: Path) -> Path:
    """The folder to work in; made where it is one of the session's, by whichever rank is first.

    Shipped files are copied: the cache has them as they were sent, and a script may write next to itself.

    Args:
        session: the session's own folder on this node, gone when the session ends.

    Raises:
        RunError: the folder that the order names is not there.
    """
    if place.folder is not None:
        folder = Path(place.folder).expanduser()
        if not folder.is_dir():
            raise RunError(
                f"there is no folder {folder} on this node",
                hint="--workdir names a folder that every node has; without it, the script's folder is sent",
            )
    else:
        folder = session / place.name
        with (session / f"{place.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                _copy_tree(place.tree, session / f"{place.name}.new", folder)
    if place.output is not None:
        (folder / place.output).mkdir(parents=True, exist_ok=True)
    return folder


def remove_copies(names: Iterable[str], session: Path) -> None:
    """Removes copies of the shipped files, with all that was written in them."""
    for name in names:
        shutil.rmtree(session / name, ignore_errors=True)


def _copy_tree(tree: str | None, unfinished: Path, folder: Path) -> None:
    if unfinished.exists():
        shutil.rmtree(unfinished)
    if tree is None:
        unfinished.mkdir()
    else:
        own = {MANIFEST, BYTECODE_LIST}
        shutil.copytree(
            tree,
            unfinished,
            ignore=lambda inside, _names: own if inside == tree else set(),
            copy_function=_copy_file,
        )
    unfinished.chmod(0o700)
    unfinished.rename(folder)


def _copy_file(source: str, target: str) -> str:
    """Copies a file, to be read and written by this user; executable where it says so itself (``#!``)."""
    shutil.copyfile(source, target)
    with Path(target).open("rb") as file:
        head = file.read(4)
    is_program = head.startswith(b"#!") or head == b"\x7fELF"
    Path(target).chmod(0o700 if is_program else 0o600)
    return target


def list_output(place: Workplace, session: Path) -> OutputListing:
    """The files in the output folder, by their paths in it, with their digests."""
    top = _output_folder(place, session)
    files, skipped = [], []
    if top is not None and top.is_dir():
        for folder, _, names in os.walk(top):
            for name in sorted(names):
                path = Path(folder, name)
                relative = path.relative_to(top).as_posix()
                try:
                    is_file = path.is_file() and not path.is_symlink()
                    size, digest = (path.stat().st_size, file_digest(path)) if is_file else (0, "")
                except OSError:  # gone meanwhile
                    continue
                if is_file:
                    files.append(OutputFile(relative, str(path), size, digest))
                else:
                    skipped.append(relative)
    return OutputListing(tuple(files), tuple(skipped))


def place_output(order: PlaceOutput, session: Path) -> None:
    """Puts the pushed files where a script's ranks look for them.

    Raises:
        RunError: a path leads out of the folder.
    """
    enter_workplace(order.workplace, session)
    top = _output_folder(order.workplace, session)
    assert top is not None, "an order to place output names its folder"
    for name, file in order.files.items():
        try:
            check_relative_path(name)
        except ValueError as exc:
            raise RunError(f"an output file's name can't be used: {exc}") from exc
        target = top / name
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_name(f".{target.name[:80]}.skyctl")
        shutil.copyfile(file.path, unfinished)
        unfinished.replace(target)


def _output_folder(place: Workplace, session: Path) -> Path | None:
    if place.output is None:
        return None
    within = session / place.name if place.folder is None else Path(place.folder).expanduser()
    return within / place.output
