"""Skyctl's node side: the modules that the launcher sends to nodes, and the digest that names them."""

from __future__ import annotations

import functools
from pathlib import Path

from skyctl.agent.node_cache import tree_digest

PACKAGE_FOLDER = Path(__file__).resolve().parent.parent
NODE_PACKAGES = (
    "agent",
    "schedule",
    "script",
    "torch",
    "workload",
    "checkpoint/node",
    "device",
    "experts",
    "transport",
    "turns",
    "worker",
    "probe/node",
    "setup/node",
)
NODE_MODULES = (
    "__init__.py",
    "errors.py",
    "private_folder.py",
    "checkpoint/__init__.py",
    "probe/__init__.py",
    "check/__init__.py",
    "check/check_orders.py",
    "check/check_task.py",
    "setup/__init__.py",
)


@functools.cache
def node_package_files() -> dict[str, bytes]:
    """Path (``skyctl/…``) to source, of every module that may run on a node."""
    root = PACKAGE_FOLDER
    paths = [root / name for name in NODE_MODULES]
    for room in NODE_PACKAGES:
        paths += sorted((root / room).rglob("*.py"))
    return {f"skyctl/{path.relative_to(root).as_posix()}": path.read_bytes() for path in paths}


@functools.cache
def code_digest() -> str:
    """The digest under which this process's skyctl sends its node side, or was sent itself."""
    return tree_digest(node_package_files())
