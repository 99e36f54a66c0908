"""The folder of a shared device in a node's cache, and how its one arbiter is found or started.

::

    CACHE/turns/DEVICE/
    ├── lock    held while an arbiter is looked for, started, or ends
    ├── line    the arbiter's socket
    └── log     what an arbiter printed that failed; locked by the one that runs

A job that finds no arbiter makes the socket, under the lock, and starts a process with it. So two first jobs
find one arbiter, and a job is in the socket's queue before the arbiter runs. The arbiter ends under the same
lock, when no job is left and none is in the queue.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from skyctl.agent.module_command import module_command
from skyctl.agent.node_package import PACKAGE_FOLDER
from skyctl.agent.unix_socket import SOCKET_NAME, connect_in_folder, listen_in_folder
from skyctl.errors import RunError
from skyctl.private_folder import make_private_folder

TURNS_FOLDER = "turns"
LOCK_NAME, LOG_NAME = "lock", "log"
START_S = 60.0
MAX_NAME_CHARS = 200


def device_folder(cache: Path, device: str) -> Path:
    """The device's folder, made (0700) where it is missing.

    Raises:
        RunError: the name is too long, or none.
        OSError: the system refuses.
    """
    name = quote(device, safe="")
    if not 0 < len(name) <= MAX_NAME_CHARS or name in (".", ".."):
        raise RunError(
            f"device {device[:60]!r} can't be shared: its name needs 1 to {MAX_NAME_CHARS} characters"
        )
    return make_private_folder(cache / TURNS_FOLDER / name)


def connect_to_arbiter(folder: Path) -> socket.socket:
    """A connection to the device's arbiter, which is started where there is none.

    If it could not be, the connection ends at once. Raises OSError.
    """
    while True:
        make_private_folder(folder)
        with locked_folder(folder) as is_there:
            if not is_there:
                continue  # `skyctl clean` has removed it meanwhile
            with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
                return connect_in_folder(folder)
            (folder / SOCKET_NAME).unlink(missing_ok=True)
            with listen_in_folder(folder) as listener:
                sock = connect_in_folder(folder)
                _start_arbiter(folder, listener)
                return sock


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[bool]:
    """Holds the folder's lock for the time; False where the folder was removed before that was had."""
    fd = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield (folder / LOCK_NAME).exists() and os.path.samestat(os.fstat(fd), (folder / LOCK_NAME).stat())
    finally:
        os.close(fd)


def _start_arbiter(folder: Path, listener: socket.socket) -> None:
    """Starts the process, which forks: it is no child of ours, so nobody here needs to wait for its end.

    If it fails, nobody has the socket any more, and who has connected to it finds that out.
    """
    fd = listener.fileno()
    command = module_command(sys.executable, "skyctl.turns.turn_server", str(fd), str(folder))
    with (folder / LOG_NAME).open("wb") as output, contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(
            command,
            check=False,
            env={**os.environ, "PYTHONPATH": str(PACKAGE_FOLDER.parent)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=[fd],
            timeout=START_S,
        )
