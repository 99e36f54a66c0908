"""The launcher's side of a nursery (``agent/nursery.py``): local nodes' agents forked from one process.

Where it can't be had or fails, nodes are started one by one, as every other node is.
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
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO

from skyctl.agent.fork import placeholders
from skyctl.agent.nursery import MESSAGE_BYTES
from skyctl.agent.process import SESSION_TAG
from skyctl.agent.store import Store, cache_root
from skyctl.records.cluster import Node
from skyctl.remote.base import ConnectOptions, Remote
from skyctl.remote.bootstrap import interpreter
from skyctl.remote.connect import connect
from skyctl.remote.local import LocalRemote, ProcessChannel
from skyctl.remote.package import node_archive

MODULES = ("skyctl.worker.warm", "skyctl.probe.node.serve")
READY_S = 60.0
BIRTH_S = 20.0
END_S = 5.0
PROGRAM = (
    "import sys;sys.path.insert(0,sys.argv[2]);from skyctl.agent.nursery import main;"
    "main(int(sys.argv[1]),sys.argv[2],sys.argv[3:])"
)
ALONE = {"OPENBLAS_NUM_THREADS": "1"}
"""Where it is installed, torch imports numpy, whose OpenBLAS starts a thread for each further core."""

NO_NUMPY = "ignore:Failed to initialize NumPy"
"""Torch warns where there is no numpy; tasks that import it themselves filter that too."""


class Nursery:
    """The process, for as long as somebody holds it; who makes it is the first.

    It ends when its socket's other end is closed, so also when the launcher is killed. (No PDEATHSIG: that
    would come when the thread that has started it ends.)

    Args:
        modules: what it imports.

    Raises:
        OSError, ValueError: no place for the package, no process.
    """

    def __init__(self, modules: Sequence[str] = MODULES) -> None:
        digest, archive = node_archive()
        store = Store(cache_root())
        package = store.tree("packages", digest) or store.add_tree("packages", digest, archive)
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            arguments = [str(theirs.fileno()), str(package), *modules]
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-P", "-W", NO_NUMPY, "-c", PROGRAM, *arguments],
                env={**ALONE, "TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ, **placeholders()},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._lock = threading.Lock()
        self._holders = 1
        self._ready: bool | None = None

    @property
    def pid(self) -> int:
        """The nursery's process."""
        return self._process.pid

    def birth(self, program: str, stream: socket.socket) -> Born:
        """Forks a process that runs the Python program with that as standard input and output.

        Raises:
            OSError: the nursery is gone, or did not answer in time.
        """
        with self._lock:
            if self._ready is None:
                self._ready = self._heard(READY_S)[0].get("ready", False)
            if not self._ready:
                raise OSError("the nursery can't be used")
            errors, their_errors = os.pipe()
            status, their_status = os.pipe()
            try:
                fds = [stream.fileno(), their_errors, their_status]
                socket.send_fds(self._sock, [json.dumps({"program": program}).encode()], fds)
                answer, pidfd = self._heard(BIRTH_S)
                if pidfd is None:
                    raise OSError(answer.get("error", "the nursery is gone"))
            except BaseException:
                self._ready = False  # what it may say later would be taken for the answer to something else
                os.close(errors)
                os.close(status)
                raise
            finally:
                os.close(their_errors)
                os.close(their_status)
        return Born(int(answer["pid"]), pidfd, status, os.fdopen(errors, "rb", buffering=0))

    def _heard(self, timeout_s: float) -> tuple[dict[str, Any], int | None]:
        """The next answer, empty where none comes, and the descriptor that came with it."""
        self._sock.settimeout(timeout_s)
        try:
            data, fds, _, _ = socket.recv_fds(self._sock, MESSAGE_BYTES, 1)
        except OSError:
            return {}, None
        return (json.loads(data) if data else {}), (fds[0] if fds else None)

    def hold(self) -> None:
        """Another holder."""
        with self._lock:
            self._holders += 1

    def release(self) -> None:
        """One holder less; the last one ends it."""
        with self._lock:
            self._holders -= 1
            if self._holders:
                return
            self._ready = False
            self._sock.close()
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


class Born:
    """A process that the nursery forked: what is used of ``subprocess.Popen``."""

    def __init__(self, pid: int, pidfd: int, status_fd: int, stderr: BinaryIO) -> None:
        self.pid = pid
        self.stderr = stderr
        self._lock = threading.Lock()
        self._fds: tuple[int, int] | None = (pidfd, status_fd)
        self._status: int | None = None

    def wait(self, timeout: float | None = None) -> int | None:
        """Its exit status once it has ended; None where the nursery ended first and nobody can tell.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        with self._lock:
            if self._fds is None:
                return self._status
            pidfd, status_fd = self._fds
            if not _readable(pidfd, timeout):
                raise subprocess.TimeoutExpired("agent", timeout or 0.0)
            said = os.read(status_fd, 16) if _readable(status_fd, END_S) else b""
            self._status = int(said) if said else None
            os.close(pidfd)
            os.close(status_fd)
            self._fds = None
            return self._status

    def signal_group(self, number: int) -> None:
        """Sends a signal to it and its group, unless it has ended."""
        with self._lock:
            if self._fds is not None and not _readable(self._fds[0], 0):
                os.killpg(self.pid, number)


def _readable(fd: int, timeout_s: float | None) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))


class BornRemote(LocalRemote):
    """This machine, by way of a nursery: an agent's command becomes a fork instead of a new Python."""

    def __init__(self, node: Node, nursery: Nursery) -> None:
        super().__init__(node)
        self._nursery: Nursery | None = nursery
        nursery.hold()

    def open(self, command: str) -> ProcessChannel:
        """As a shell would; ``PYTHON -u -c PROGRAM`` with the nursery's Python is forked."""
        words = shlex.split(command)
        if self._nursery is None or words[:3] != [sys.executable, "-u", "-c"] or len(words) != 4:
            return super().open(command)
        nursery = self._nursery
        try:
            channel = ProcessChannel(lambda theirs: nursery.birth(words[3], theirs), self.node.name)
        except OSError:
            return super().open(command)
        self._channels.append(channel)
        return channel

    def close(self) -> None:
        """Ends every command started here, and lets the nursery go."""
        super().close()
        self._let_go()

    def hang_up(self) -> None:
        """Leaves them to themselves, and lets the nursery go: what it has forked outlives it."""
        super().hang_up()
        self._let_go()

    def _let_go(self) -> None:
        nursery, self._nursery = self._nursery, None
        if nursery is not None:
            nursery.release()


def alike(nodes: Sequence[Node]) -> set[str]:
    """The nodes that one nursery can serve: local, with our own Python and environment; none for just one."""
    if not sys.platform.startswith("linux") or SESSION_TAG in os.environ:
        return set()
    found = {
        node.name
        for node in nodes
        if node.transport == "local" and not node.env and interpreter(node) == sys.executable
    }
    return found if len(found) > 1 else set()


@contextlib.contextmanager
def connector_for(nodes: Sequence[Node]) -> Iterator[Callable[[Node, ConnectOptions], Remote]]:
    """``connect``, with the nodes that are alike born in one nursery; it lives as long as one of them."""
    served = alike(nodes)
    nursery = None
    if served:
        with contextlib.suppress(OSError, ValueError):
            nursery = Nursery()
    if nursery is None:
        yield connect
        return

    def born(node: Node, options: ConnectOptions) -> Remote:
        return BornRemote(node, nursery) if node.name in served else connect(node, options)

    try:
        yield born
    finally:
        nursery.release()
