"""Processes as /proc shows them, and waiting for what is to happen. Used by tests and by benchmarks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

PATIENCE_S = 240.0
"""How long what must happen may take, on a machine that does much else."""
MOMENT_S = 20.0
"""How long what is ending may take to be gone."""


def until(
    happened: Callable[[], Any], what: Callable[[], object] = lambda: "", patience_s: float = PATIENCE_S
) -> Any:
    """The value that ``happened`` gives as soon as that is true. Fails with ``what`` where it is not in time.

    Files that are not there yet, or half there, are looked at again.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            if found := happened():
                return found
        except (OSError, ValueError, LookupError, StopIteration):
            pass
        assert time.monotonic() < deadline, f"it did not happen: {what()}"
        time.sleep(0.03)


def after_a_moment(left: Callable[[], Any]) -> Any:
    """The leftovers once what is ending has had a moment; at once if there are none."""
    deadline = time.monotonic() + MOMENT_S
    while (found := left()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def files(folder: Path, *patterns: str) -> set[Path]:
    """The paths that match these patterns, while things come and go."""
    while True:
        with suppress(FileNotFoundError):
            return {path for pattern in patterns for path in folder.glob(pattern)}


def read(pid: int, name: str) -> bytes:
    """A file of that process's in /proc; empty where it is gone."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def command(pid: int) -> str:
    """How it was started, or what it calls itself; empty where it has ended."""
    return read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()


def runs(pid: int) -> bool:
    """Whether it is there and has not ended."""
    state = read(pid, "stat").rpartition(b")")[2].split()
    return bool(state) and state[0] not in (b"Z", b"X")


def parent(pid: int) -> int:
    """Its parent's id; 0 where it is gone."""
    fields = read(pid, "stat").rpartition(b")")[2].split()
    return int(fields[1]) if fields else 0


def marked(mark: str, *, prefix: bool = False) -> list[int]:
    """All others that have ``NAME=VALUE`` (``prefix``: what begins so) in their environment and run."""
    wanted = mark.encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            values = read(int(entry.name), "environ").split(b"\0")
            if any(v.startswith(wanted) if prefix else v == wanted for v in values) and runs(int(entry.name)):
                found.append(int(entry.name))
    return found


def of_state(folder: Path) -> list[int]:
    """Those that were started with this state folder (SKYCTL_HOME): commands, and agents of local nodes."""
    return marked(f"SKYCTL_HOME={folder}")


def left_of_state(folder: Path) -> list[int]:
    """The same, after a moment."""
    found: list[int] = after_a_moment(lambda: of_state(folder))
    return found


def of_session(session: str, word: str) -> list[int]:
    """Tasks of that session, on this machine or in a lab's node, whose command has ``word`` in it."""
    return [pid for pid in marked(f"SKYCTL_TASK={session}/", prefix=True) if word in command(pid)]
