"""A node that is this machine: commands run in sessions of their own, so Ctrl-C reaches only the launcher.

Its standard input and output are one socket pair: shutting that down wakes a blocked reader at once, which
closing a pipe does not.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from functools import partial
from io import BufferedReader
from typing import BinaryIO, Protocol, cast

from skyctl.errors import UnfitError
from skyctl.records.cluster import Node
from skyctl.remote.base import STDERR_WAIT_S, StderrTail

REAP_INTERVAL_S = 0.5


class LocalProcess(Protocol):
    """A process in a group of its own, started by a shell or forked by the fork server."""

    stderr: BinaryIO

    def wait(self, timeout: float | None = None) -> int | None:
        """The exit status; None where nobody can tell. Raises subprocess.TimeoutExpired."""

    def signal_group(self, number: int) -> None:
        """Sends a signal to it and its group. ProcessLookupError where there is none."""


class ShellProcess:
    """A command of this machine's shell."""

    def __init__(self, command: str, stream: socket.socket) -> None:
        self._popen = subprocess.Popen(
            ["/bin/sh", "-c", command],
            stdin=stream.fileno(),
            stdout=stream.fileno(),
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        self.stderr = cast(BinaryIO, self._popen.stderr)

    def wait(self, timeout: float | None = None) -> int | None:
        """The exit status. Raises subprocess.TimeoutExpired."""
        return self._popen.wait(timeout)

    def signal_group(self, number: int) -> None:
        """Sends a signal to it and its group."""
        os.killpg(self._popen.pid, number)


class ProcessChannel:
    """A process of this machine as a channel.

    Args:
        start: starts it, with that socket as its standard input and output.
    """

    def __init__(self, start: Callable[[socket.socket], LocalProcess], name: str) -> None:
        ours, theirs = socket.socketpair()
        try:
            self._process = start(theirs)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.sock = ours
        self.stdin: BinaryIO = cast(BinaryIO, ours.makefile("wb", buffering=0))
        self.stdout: BinaryIO = BufferedReader(ours.makefile("rb", buffering=0))
        self._tail = StderrTail(self._process.stderr, name)
        self._closing = threading.Lock()
        self._is_detached = False

    def stderr_tail(self) -> str:
        """The last of what the command wrote to standard error."""
        return self._tail.text()

    def returncode(self) -> int | None:
        """The exit status, waited for up to 2 s."""
        try:
            status = self._process.wait(2)
        except subprocess.TimeoutExpired:
            return None
        self._tail.wait(STDERR_WAIT_S)
        return status

    def close(self) -> None:
        """Ends the input and wakes readers; ends the command's group if it does not end by itself."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        with self._closing:
            for wait_s, number in ((10, signal.SIGTERM), (2, signal.SIGKILL)):
                try:
                    self._process.wait(wait_s)
                except subprocess.TimeoutExpired:
                    self._signal(number)
            self._process.wait()
            self._tail.finish(2)

    def detach(self) -> None:
        """Ends the input and wakes readers; the command is left running, and reaped when it ends."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        if not self._is_detached:
            self._is_detached = True
            threading.Thread(target=self._reap, name="reap", daemon=True).start()

    def _reap(self) -> None:
        while True:
            try:
                self._process.wait(0)
            except subprocess.TimeoutExpired:
                time.sleep(REAP_INTERVAL_S)
                continue
            break
        self._tail.finish(2)
        self.release()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            self._process.signal_group(number)

    def release(self) -> None:
        """Closes the files; only when nobody reads them any more."""
        for file in (self.stdin, self.stdout, self.sock):
            with contextlib.suppress(OSError):
                file.close()


class LocalConnection:
    """This machine as a node: each channel is a process."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.host = "127.0.0.1"
        self._channels: list[ProcessChannel] = []

    def open(self, command: str) -> ProcessChannel:
        """Starts a shell command here."""
        try:
            channel = ProcessChannel(partial(ShellProcess, command), self.node.name)
        except OSError as exc:
            raise UnfitError(
                f"node {self.node.name} can't start a process: {exc}", node=self.node.name
            ) from exc
        self._channels.append(channel)
        return channel

    def close(self) -> None:
        """Ends every command started here."""
        while self._channels:
            channel = self._channels.pop()
            channel.close()
            channel.release()

    def detach(self) -> None:
        """Leaves every command started here running; ``close`` still ends them."""
        for channel in self._channels:
            channel.detach()
