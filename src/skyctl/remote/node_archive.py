"""The archive of skyctl's node side that the launcher sends, and the program that unpacks it on a node."""

from __future__ import annotations

import base64
import functools
import re
import zlib

from skyctl.agent.node_cache import pack_archive
from skyctl.agent.node_package import PACKAGE_FOLDER, node_package_files

BOOT_SOURCES = ("private_folder.py", "agent/node_cache.py", "agent/boot_program.py")
"""The sources that the first line runs, in one namespace."""
CLEANUP_SOURCE = "agent/cache_cleanup.py"


@functools.cache
def node_package_archive() -> tuple[str, bytes]:
    """The package's digest and archive."""
    return pack_archive(node_package_files())


def boot_program_line(*more: str) -> bytes:
    """``BOOT_SOURCES`` and ``more`` of our sources as one line."""
    future = "from __future__ import annotations\n"
    sources = "".join((PACKAGE_FOLDER / name).read_text(encoding="utf-8") for name in (*BOOT_SOURCES, *more))
    program = re.sub(r"^from (skyctl\.\S+|__future__) import [^(\n]+\n", "", sources, flags=re.MULTILINE)
    return base64.b64encode(zlib.compress(f"{future}{program}\nboot()\n".encode(), 9)) + b"\n"
