"""Which processes are ours, and ending them: by descent and by a tag in their environment, never by name.

Descent works because the agent is a child subreaper (Linux): what a task orphans becomes the agent's child.
The tag works for what an agent that is gone has left. Elsewhere than Linux only process groups remain.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
SESSION_TAG = "SKYCTL_SESSION"
TASK_TAG = "SKYCTL_TASK"
PROC = Path("/proc")


class Entry(NamedTuple):
    """One row of the process table."""

    parent: int
    state: str
    start: int


def _prctl(option: int, value: int) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    try:
        return bool(ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) == 0)
    except (OSError, AttributeError):
        return False


def become_subreaper() -> bool:
    """Orphans of our descendants become our children. False where the system can't."""
    return _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """We are killed when the parent is, at once if it is gone already. A layer, not the cure."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def entry(pid: int) -> Entry | None:
    """The process's row, or None where there is none (or no /proc)."""
    try:
        text = (PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    fields = text[text.rfind(b")") + 2 :].split()
    return Entry(int(fields[1]), fields[0].decode(), int(fields[19]))


def table() -> dict[int, Entry]:
    """Every process that can be seen."""
    try:
        pids = [int(name) for name in os.listdir(PROC) if name.isdigit()]  # noqa: PTH208
    except OSError:
        return {}
    rows = {pid: entry(pid) for pid in pids}
    return {pid: row for pid, row in rows.items() if row is not None}


def descendants(rows: dict[int, Entry], root: int) -> set[int]:
    """The process's children, their children, and so on; not itself."""
    children: dict[int, list[int]] = {}
    for pid, row in rows.items():
        children.setdefault(row.parent, []).append(pid)
    found: set[int] = set()
    todo = [root]
    while todo:
        for child in children.get(todo.pop(), ()):
            if child not in found:
                found.add(child)
                todo.append(child)
    return found


def tagged(rows: Iterable[int], key: str, value: str) -> set[int]:
    """The processes whose environment holds ``key=value`` (of those whose environment may be read)."""
    mark = b"\0" + f"{key}={value}".encode() + b"\0"
    found = set()
    for pid in rows:
        try:
            if mark in b"\0" + (PROC / str(pid) / "environ").read_bytes() + b"\0":
                found.add(pid)
        except OSError:
            continue
    return found


def alive(rows: dict[int, Entry], pids: Iterable[int]) -> set[int]:
    """Those that still run: there, and no zombies."""
    return {pid for pid in pids if pid in rows and rows[pid].state not in "ZX"}


def send(pids: Iterable[int], number: int) -> None:
    """Sends a signal to each; those gone or not ours are passed over. Never to 0, 1 or ourselves."""
    for pid in pids:
        if pid > 1 and pid != os.getpid():
            try:
                os.kill(pid, number)
            except (ProcessLookupError, PermissionError):
                continue


def boot_id() -> str:
    """Changes when the machine starts anew; empty where unknown."""
    try:
        return (PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
