"""What the agent says of its node when it starts."""

from __future__ import annotations

import os
import platform
import socket
import struct
import sys
from pathlib import Path
from typing import Any

from skyctl.agent.folder import SessionFolder

SIOCGIFADDR = 0x8915


def hello(folder: SessionFolder, cache: Path) -> dict[str, Any]:
    """Names, paths and addresses; ``addresses`` holds [interface, IPv4] pairs."""
    return {
        "hostname": socket.gethostname(),
        "python": sys.executable,
        "version": platform.python_version(),
        "platform": platform.platform(),
        "pid": os.getpid(),
        "guardian": folder.guardian,
        "session": folder.id,
        "folder": str(folder.path),
        "addresses": addresses(),
        "home": os.path.expanduser("~"),  # noqa: PTH111 - Path.home() raises where there is none
        "cache": str(cache),
        "cwd": os.getcwd(),  # noqa: PTH109
    }


def addresses() -> list[list[str]]:
    """[interface, IPv4] of every interface that has one (Linux; elsewhere empty)."""
    if not sys.platform.startswith("linux"):
        return []
    import fcntl

    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(sock, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            found.append([name, socket.inet_ntoa(answer[20:24])])
    return found
