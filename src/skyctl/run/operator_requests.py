"""What other commands ask of a run's supervisor: files in ``requests/`` that it looks for twice a second."""

from __future__ import annotations

import json
import os
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyctl.files import RunPaths, make_private, write_atomic


class StopRequested(KeyboardInterrupt):
    """Another command has asked for the run's end."""


@dataclass(frozen=True)
class StopRunRequest:
    """End the run. ``checkpoint``: after a last checkpoint, so that it can be resumed."""

    checkpoint: bool = True


@dataclass(frozen=True)
class JoinRequest:
    """Use these nodes, too, where that makes the run faster."""

    nodes: tuple[str, ...]


def leave_request(paths: RunPaths, request: StopRunRequest | JoinRequest) -> Path:
    """Leaves a request to the run's supervisor.

    Returns:
        Its file, which is gone once the supervisor has taken it.
    """
    make_private(paths.requests)
    name = f"{time.time_ns():020d}-{secrets.token_hex(2)}.json"
    if isinstance(request, StopRunRequest):
        written: dict[str, Any] = {"op": "stop", "checkpoint": request.checkpoint}
    else:
        written = {"op": "join", "nodes": list(request.nodes)}
    return write_atomic(paths.requests / name, json.dumps(written))


def take_requests(paths: RunPaths) -> list[StopRunRequest | JoinRequest]:
    """What was asked since the last time, the oldest first, and is now removed; what can't be read stays."""
    try:
        names = sorted(name for name in os.listdir(paths.requests) if name.endswith(".json"))  # noqa: PTH208
    except OSError:
        return []
    found: list[StopRunRequest | JoinRequest] = []
    for name in names:
        with suppress(OSError, ValueError):
            written = json.loads((paths.requests / name).read_text())
            if not isinstance(written, dict) or name.startswith("."):
                continue
            with suppress(OSError):
                (paths.requests / name).unlink()
            if written.get("op") == "stop":
                found.append(StopRunRequest(bool(written.get("checkpoint", True))))
            elif written.get("op") == "join":
                found.append(JoinRequest(tuple(str(node) for node in written.get("nodes", []))))
    return found
