"""What the launcher sends to a node: skyctl's node side, and the program that puts it in place there."""

from __future__ import annotations

import base64
import functools
import re
import zlib
from pathlib import Path

from skyctl.agent.node_cache import pack_archive

PACKAGE_FOLDER = Path(__file__).resolve().parent.parent
NODE_PACKAGES = (
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
NODE_MODULES = (
    "__init__.py",
    "errors.py",
    "private_folder.py",
    "probe/__init__.py",
    "check/__init__.py",
    "check/check_task.py",
    "setup/__init__.py",
)
BOOT_SOURCES = ("private_folder.py", "agent/node_cache.py", "agent/boot_program.py")
"""What the first line runs, in one namespace."""
CLEANUP_SOURCE = "agent/cache_cleanup.py"


@functools.cache
def node_package_files() -> dict[str, bytes]:
    """Path (``skyctl/…``) to source, of every module that may run on a node."""
    root = PACKAGE_FOLDER
    paths = [root / name for name in NODE_MODULES]
    for room in NODE_PACKAGES:
        paths += sorted((root / room).rglob("*.py"))
    return {f"skyctl/{path.relative_to(root).as_posix()}": path.read_bytes() for path in paths}


@functools.cache
def node_package_archive() -> tuple[str, bytes]:
    """The package's digest and archive."""
    return pack_archive(node_package_files())


def boot_program_line(*more: str) -> bytes:
    """``BOOT_SOURCES`` and ``more`` of our sources as one line."""
    future = "from __future__ import annotations\n"
    sources = "".join((PACKAGE_FOLDER / name).read_text(encoding="utf-8") for name in (*BOOT_SOURCES, *more))
    one = re.sub(r"^from (skyctl\.\S+|__future__) import [^(\n]+\n", "", sources, flags=re.MULTILINE)
    return base64.b64encode(zlib.compress(f"{future}{one}\nboot()\n".encode(), 9)) + b"\n"
