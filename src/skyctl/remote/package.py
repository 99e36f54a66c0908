"""skyctl's node side as files, to be shipped: what runs on a node with Python and torch and nothing else."""

from __future__ import annotations

import functools
from pathlib import Path

from skyctl.agent.store import pack

ROOMS = (
    "agent",
    "schedule",
    "workload",
    "checkpoint",
    "device",
    "transport",
    "worker",
    "probe/node",
    "setup/node",
)
MODULES = (
    "__init__.py",
    "errors.py",
    "probe/__init__.py",
    "check/__init__.py",
    "check/node.py",
    "setup/__init__.py",
)


@functools.cache
def node_package() -> dict[str, bytes]:
    """Path (``skyctl/…``) to source, of every module that may run on a node."""
    root = Path(__file__).resolve().parent.parent
    paths = [root / name for name in MODULES]
    for room in ROOMS:
        paths += sorted((root / room).rglob("*.py"))
    return {
        f"skyctl/{path.relative_to(root).as_posix()}": path.read_bytes() for path in paths if path.is_file()
    }


@functools.cache
def node_archive() -> tuple[str, bytes]:
    """The package's digest and archive."""
    return pack(node_package())
