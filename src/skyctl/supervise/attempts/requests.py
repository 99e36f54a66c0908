"""What other commands ask of a run's supervisor: files in ``requests/`` that it looks for twice a second."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from pathlib import Path
from typing import Any

from skyctl.files import RunPaths, make_private, write_atomic


def ask(paths: RunPaths, request: dict[str, Any]) -> Path:
    """Leaves a request: ``{"op": "stop", "checkpoint": True}`` or ``{"op": "join", "nodes": ["b"]}``.

    Returns:
        Its file, which is gone once the supervisor has taken it.
    """
    make_private(paths.requests)
    name = f"{time.time_ns():020d}-{secrets.token_hex(2)}.json"
    return write_atomic(paths.requests / name, json.dumps(request))


def pending(paths: RunPaths) -> list[tuple[Path, dict[str, Any]]]:
    """What was asked, the oldest first. Whoever has dealt with one unlinks its file."""
    found: list[tuple[Path, dict[str, Any]]] = []
    try:
        names = sorted(name for name in os.listdir(paths.requests) if name.endswith(".json"))  # noqa: PTH208
    except OSError:
        return []
    for name in names:
        with contextlib.suppress(OSError, ValueError):
            request = json.loads((paths.requests / name).read_text())
            if isinstance(request, dict) and not name.startswith("."):
                found.append((paths.requests / name, request))
    return found
