"""Base of ssh and local connections: a ``NodeConnection`` opens a ``CommandChannel`` for each command."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from skyctl.records.cluster import Node

STDERR_TAIL_BYTES = 16 << 10
STDERR_WAIT_S = 0.5
"""For what an ended command wrote last; something it left behind may hold the stream open for ever."""


@dataclass(frozen=True)
class ConnectOptions:
    """How to connect, the same for all nodes.

    Args:
        accept_new_host_keys: an unknown host key is kept instead of refused; a changed one never is.
        timeout_s: for a connection, and again for a login.
        known_hosts: one more file of known hosts, read first.
        ssh_config: used instead of ``~/.ssh/config``.
        start_timeout_s: from the login to a running agent (Python may start slowly).
        grace_s: between TERM and KILL.
        lease_s: the agent ends, with all it started, when it has not heard from the launcher for so long.
        hold_s: instead, it goes on without a launcher for so long, and keeps its messages; 0: it does not.
        redial_s: how long to try to get a lost connection back before the session is lost; 0: not at all.
        manual_ack: the agent keeps every event until ``Session.acknowledge`` was called for it.
    """

    accept_new_host_keys: bool = False
    timeout_s: float = 15
    known_hosts: str | None = None
    ssh_config: str | None = None
    start_timeout_s: float = 60
    lease_s: float = 60
    grace_s: float = 2
    hold_s: float = 0
    redial_s: float = 0
    manual_ack: bool = False

    def __post_init__(self) -> None:
        """Only a session that outlives its connection can be resumed."""
        if not self.hold_s and (self.redial_s or self.manual_ack):
            raise ValueError("redial_s and manual_ack need hold_s")


class CommandChannel(Protocol):
    """A command's standard streams. ``close`` may be called by any thread, repeatedly, and wakes readers."""

    stdin: BinaryIO
    stdout: BinaryIO

    def stderr_tail(self) -> str:
        """The last of what the command wrote to standard error."""

    def close(self) -> None:
        """Ends the command and its streams."""

    def detach(self) -> None:
        """As ``close``, but the command is left running, where that makes a difference."""

    def returncode(self) -> int | None:
        """The exit status (negative: a signal), waited for briefly; None while it runs or where unknown."""


class NodeConnection(Protocol):
    """A connection to one node. ``host``: the address that was dialled, "127.0.0.1" for local."""

    node: Node
    host: str

    def open(self, command: str) -> CommandChannel:
        """Starts a POSIX shell command there. Errors are NodeErrors."""

    def close(self) -> None:
        """Ends the connection and every channel."""

    def detach(self) -> None:
        """Ends the connection; commands are left running, until ``close``, where that is called."""


class StderrTail:
    """Reads a stream to its end in a thread, so that it never fills up, and keeps the last 16 KiB."""

    def __init__(self, stream: BinaryIO, name: str) -> None:
        self._stream = stream
        self._parts: deque[bytes] = deque()
        self._size_bytes = 0
        self._thread = threading.Thread(target=self._read, name=f"stderr of {name}", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            while data := self._stream.read(4096):
                self._parts.append(data)
                self._size_bytes += len(data)
                while self._size_bytes - len(self._parts[0]) > STDERR_TAIL_BYTES:
                    self._size_bytes -= len(self._parts.popleft())
        except (OSError, ValueError):
            return

    def text(self) -> str:
        """The kept end of the stream, as text."""
        return b"".join(list(self._parts)).decode(errors="replace")[-STDERR_TAIL_BYTES:]

    def wait(self, timeout_s: float) -> None:
        """Waits for the stream's end: what a command that has ended wrote last may still be on its way."""
        self._thread.join(timeout_s)

    def finish(self, timeout_s: float) -> None:
        """Waits for the stream's end, then closes it."""
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._stream.close()
