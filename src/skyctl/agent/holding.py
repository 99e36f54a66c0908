"""A task that looks, from outside, what another session has running on its node. It disturbs nothing."""

from __future__ import annotations

import os
from typing import Any

from skyctl.agent import process


def main(payload: dict[str, Any], _channel: Any) -> dict[str, Any]:
    """By session id, its processes: how many there are (``processes``), and how many of those run ``module``.

    ``payload``: ``sessions`` (ids) and ``module``.
    """
    rows = process.table()
    mark = str(payload["module"]).encode()
    found = {}
    for session in payload["sessions"]:
        pids = process.alive(rows, process.tagged(rows, process.SESSION_TAG, session)) - {os.getpid()}
        found[session] = {"processes": len(pids), "running": sum(_runs(pid, mark) for pid in pids)}
    return {"sessions": found}


def _runs(pid: int, module: bytes) -> bool:
    try:
        # A forked task has its command line as one word, any other one word an argument.
        return module in (process.PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").split()
    except OSError:
        return False
