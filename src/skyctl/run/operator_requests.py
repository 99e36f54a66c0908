"""Other commands' requests to a run's supervisor: files in ``requests/`` that it looks for twice a second."""

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
from skyctl.run.journal import Journal


class StopRequested(KeyboardInterrupt):
    """Another command (``skyctl stop``) has asked for the run's end; raised in the supervising thread."""


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
    """Takes and removes the requests made since the last time, the oldest first; unreadable ones stay."""
    try:
        names = sorted(name for name in os.listdir(paths.requests) if name.endswith(".json"))  # noqa: PTH208
    except OSError:
        return []
    requests: list[StopRunRequest | JoinRequest] = []
    for name in names:
        with suppress(OSError, ValueError):
            written = json.loads((paths.requests / name).read_text())
            if not isinstance(written, dict) or name.startswith("."):
                continue
            with suppress(OSError):
                (paths.requests / name).unlink()
            if written.get("op") == "stop":
                requests.append(StopRunRequest(bool(written.get("checkpoint", True))))
            elif written.get("op") == "join":
                requests.append(JoinRequest(tuple(str(node) for node in written.get("nodes", []))))
    return requests


class OperatorRequests:
    """The requests to a run that is played; that it is to end stands in its state, too.

    ``stop``: its end; None: nobody has asked for that.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.stop: StopRunRequest | None = None
        self._stop_asked_at = 0.0

    def take(self) -> list[JoinRequest]:
        """Takes what is new; the nodes that are to join."""
        joining = []
        for request in take_requests(self._journal.paths):
            if isinstance(request, JoinRequest):
                joining.append(request)
                continue
            if self.stop is None:
                self._stop_asked_at = time.monotonic()
                self._journal.update(status="stopping")
            if self.stop is None or not request.checkpoint:
                self.stop = request
        return joining

    @property
    def stopping_s(self) -> float:
        """How long ago somebody first asked for the run's end."""
        return time.monotonic() - self._stop_asked_at
