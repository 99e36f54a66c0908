"""The processes of a session: found by descent and by a tag in their environment, never by name, and ended.

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
from typing import Any, NamedTuple

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
SESSION_TAG = "SKYCTL_SESSION"
TASK_TAG = "SKYCTL_TASK"
PROC = Path("/proc")


class ProcessEntry(NamedTuple):
    """One row of the process table."""

    parent: int
    state: str
    start: int


def _call_prctl(option: int, value: int) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    try:
        return bool(ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) == 0)
    except (OSError, AttributeError):
        return False


def become_subreaper() -> bool:
    """Makes orphans of our descendants our children. False where the system can't."""
    return _call_prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Has this process killed when its parent ends, at once if it has ended. One safeguard among several."""
    _call_prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def process_entry(pid: int) -> ProcessEntry | None:
    """The process's row, None where there is no such process (or no /proc)."""
    try:
        text = (PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    fields = text[text.rfind(b")") + 2 :].split()
    return ProcessEntry(int(fields[1]), fields[0].decode(), int(fields[19]))


def process_start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None where there is none, or it has ended."""
    row = process_entry(pid)
    return row.start if row is not None and row.state not in "ZX" else None


def process_table() -> dict[int, ProcessEntry]:
    """Every process that can be seen."""
    try:
        pids = [int(name) for name in os.listdir(PROC) if name.isdigit()]  # noqa: PTH208
    except OSError:
        return {}
    rows = {pid: process_entry(pid) for pid in pids}
    return {pid: row for pid, row in rows.items() if row is not None}


def find_descendants(rows: dict[int, ProcessEntry], root: int) -> set[int]:
    """The process's children, their children, and so on; not itself."""
    children: dict[int, list[int]] = {}
    for pid, row in rows.items():
        children.setdefault(row.parent, []).append(pid)
    descendants: set[int] = set()
    todo = [root]
    while todo:
        for child in children.get(todo.pop(), ()):
            if child not in descendants:
                descendants.add(child)
                todo.append(child)
    return descendants


def find_tagged(rows: Iterable[int], key: str, value: str) -> set[int]:
    """The processes whose environment holds ``key=value`` (of those whose environment may be read)."""
    mark = b"\0" + f"{key}={value}".encode() + b"\0"
    tagged = set()
    for pid in rows:
        try:
            if mark in b"\0" + (PROC / str(pid) / "environ").read_bytes() + b"\0":
                tagged.add(pid)
        except OSError:
            continue
    return tagged


def filter_running(rows: dict[int, ProcessEntry], pids: Iterable[int]) -> set[int]:
    """Those of the processes that run and are no zombies."""
    return {pid for pid in pids if pid in rows and rows[pid].state not in "ZX"}


def send_signal(pids: Iterable[int], number: int) -> None:
    """Sends a signal to each but 0, 1 and ourselves; processes that are gone or not ours are skipped."""
    for pid in pids:
        if pid > 1 and pid != os.getpid():
            try:
                os.kill(pid, number)
            except (ProcessLookupError, PermissionError):
                continue


def read_boot_id() -> str:
    """An id that changes when the machine is rebooted; empty where unknown."""
    try:
        return (PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def main(payload: dict[str, Any], _channel: Any) -> dict[str, Any]:
    """A task: by session id, how many ``processes`` it has, and how many of those are ``running`` the module.

    ``payload``: ``sessions`` (ids) and ``module``.
    """
    rows = process_table()
    mark = str(payload["module"]).encode()
    sessions = {}
    for session in payload["sessions"]:
        pids = filter_running(rows, find_tagged(rows, SESSION_TAG, session)) - {os.getpid()}
        sessions[session] = {
            "processes": len(pids),
            "running": sum(_is_running_module(pid, mark) for pid in pids),
        }
    return {"sessions": sessions}


def _is_running_module(pid: int, module: bytes) -> bool:
    try:
        # A forked task has its command line as one word, any other one word an argument.
        return module in (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").split()
    except OSError:
        return False
