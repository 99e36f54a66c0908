"""The launcher's side of the fork server (``agent/forkserver.py``), which forks the agents of local nodes.

If there can be none, or it fails, local nodes are started one by one, as every other node is.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any, BinaryIO

from skyctl.agent.forkserver import MAX_MESSAGE_BYTES, tag_placeholders
from skyctl.agent.node_cache import NodeCache, default_cache_root
from skyctl.agent.task_process import ALLOCATOR_ENV
from skyctl.records.cluster import Node
from skyctl.remote.local import LocalConnection, ProcessChannel
from skyctl.remote.node_archive import node_package_archive

PRELOADED_MODULES = ("skyctl.worker.rank", "skyctl.probe.node.probe_task")
READY_TIMEOUT_S = 60.0
FORK_TIMEOUT_S = 20.0
EXIT_TIMEOUT_S = 5.0
FORKSERVER_PROGRAM = (
    "import sys;sys.path.insert(0,sys.argv[2]);from skyctl.agent.forkserver import main;"
    "main(int(sys.argv[1]),sys.argv[2],sys.argv[3:])"
)
FORKSERVER_ENV = {"OPENBLAS_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", **ALLOCATOR_ENV}
"""OpenBLAS: where it is installed, torch imports numpy, which starts a thread for each further core."""

NUMPY_WARNING_FILTER = "ignore:Failed to initialize NumPy"
"""Torch warns where there is no numpy; tasks that import it themselves filter that too."""


class ForkServerClient:
    """A fork server, which runs for as long as it has users; whoever makes it is the first.

    It ends when its socket's other end is closed, so also when the launcher is killed. (No PDEATHSIG: that
    would come when the thread that has started it ends.)

    Args:
        modules: what the server imports.

    Raises:
        OSError, ValueError: there is no room for the package, or the process can't be started.
    """

    def __init__(self, modules: Sequence[str] = PRELOADED_MODULES) -> None:
        digest, archive = node_package_archive()
        self._store = store = NodeCache(default_cache_root())
        package = store.tree("packages", digest) or store.add_tree("packages", digest, archive)
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            arguments = [str(theirs.fileno()), str(package), *modules]
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-u",
                    "-P",
                    "-W",
                    NUMPY_WARNING_FILTER,
                    "-c",
                    FORKSERVER_PROGRAM,
                    *arguments,
                ],
                env=FORKSERVER_ENV | os.environ | tag_placeholders(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._request_lock = threading.Lock()
        self._users_lock = threading.Lock()
        self._users = 1
        self._ready: bool | None = None

    @property
    def pid(self) -> int:
        """The fork server's process id."""
        return self._process.pid

    def fork(self, program: str, stream: socket.socket) -> ForkedProcess:
        """Forks a process that runs the Python program, with the socket as standard input and output.

        Raises:
            OSError: the server is gone, or did not answer in time.
        """
        with self._request_lock:
            if self._ready is None:
                self._ready = self._receive(READY_TIMEOUT_S)[0].get("ready", False)
            if not self._ready:
                raise OSError("the fork server can't be used")
            errors, their_errors = os.pipe()
            status, their_status = os.pipe()
            try:
                fds = [stream.fileno(), their_errors, their_status]
                socket.send_fds(self._sock, [json.dumps({"program": program}).encode()], fds)
                answer, pidfd = self._receive(FORK_TIMEOUT_S)
                if pidfd is None:
                    raise OSError(answer.get("error", "the fork server is gone"))
            except BaseException:
                self._ready = False  # a late answer would be taken for that to another request
                os.close(errors)
                os.close(status)
                raise
            finally:
                os.close(their_errors)
                os.close(their_status)
        return ForkedProcess(int(answer["pid"]), pidfd, status, os.fdopen(errors, "rb", buffering=0))

    def _receive(self, timeout_s: float) -> tuple[dict[str, Any], int | None]:
        """The next answer, empty where none arrives, and the descriptor that came with it."""
        self._sock.settimeout(timeout_s)
        try:
            data, fds, _, _ = socket.recv_fds(self._sock, MAX_MESSAGE_BYTES, 1)
        except OSError:
            return {}, None
        return (json.loads(data) if data else {}), (fds[0] if fds else None)

    def acquire(self) -> None:
        """Adds a user of the server."""
        with self._users_lock:
            self._users += 1

    def shut_down(self) -> None:
        """Refuses further forks, those that wait included; a server that is not ready yet is killed."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        if not self._ready:
            self._process.kill()

    def release(self) -> None:
        """Removes a user of the server; with the last one it ends."""
        with self._users_lock:
            self._users -= 1
            if self._users:
                return
        self.shut_down()
        with self._request_lock:
            self._ready = False
            self._sock.close()
            try:
                self._process.wait(EXIT_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._store.close()


class ForkedProcess:
    """A process that the fork server forked; a ``LocalProcess``."""

    def __init__(self, pid: int, pidfd: int, status_fd: int, stderr: BinaryIO) -> None:
        self.pid = pid
        self.stderr = stderr
        self._lock = threading.Lock()
        self._fds: tuple[int, int] | None = (pidfd, status_fd)
        self._status: int | None = None

    def wait(self, timeout: float | None = None) -> int | None:
        """Its exit status once it has ended; None where the fork server ended first and nobody can tell.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        with self._lock:
            if self._fds is None:
                return self._status
            pidfd, status_fd = self._fds
            if not _is_readable(pidfd, timeout):
                raise subprocess.TimeoutExpired("agent", timeout or 0.0)
            status = os.read(status_fd, 16) if _is_readable(status_fd, EXIT_TIMEOUT_S) else b""
            self._status = int(status) if status else None
            os.close(pidfd)
            os.close(status_fd)
            self._fds = None
            return self._status

    def signal_group(self, number: int) -> None:
        """Sends a signal to it and its group, unless it has ended."""
        with self._lock:
            if self._fds is not None and not _is_readable(self._fds[0], 0):
                os.killpg(self.pid, number)


def _is_readable(fd: int, timeout_s: float | None) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))


class ForkedConnection(LocalConnection):
    """This machine by way of a fork server: an agent's command becomes a fork instead of a new Python."""

    def __init__(self, node: Node, forkserver: ForkServerClient) -> None:
        super().__init__(node)
        self._forkserver: ForkServerClient | None = forkserver
        forkserver.acquire()

    def open(self, command: str) -> ProcessChannel:
        """Starts a shell command here; ``PYTHON -u -c PROGRAM`` with the launcher's own Python is forked."""
        arguments = shlex.split(command)
        if self._forkserver is None or arguments[:3] != [sys.executable, "-u", "-c"] or len(arguments) != 4:
            return super().open(command)
        forkserver = self._forkserver
        try:
            channel = ProcessChannel(lambda theirs: forkserver.fork(arguments[3], theirs), self.node.name)
        except OSError:
            return super().open(command)
        self._channels.append(channel)
        return channel

    def close(self) -> None:
        """Ends every command started here, and no longer uses the fork server."""
        super().close()
        self._release_forkserver()

    def detach(self) -> None:
        """Leaves the commands running, which outlive the fork server, and no longer uses it."""
        super().detach()
        self._release_forkserver()

    def _release_forkserver(self) -> None:
        forkserver, self._forkserver = self._forkserver, None
        if forkserver is not None:
            forkserver.release()
