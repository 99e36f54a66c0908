"""Remotes for tests: one whose far end is a function, and one that does to another what networks do."""

from __future__ import annotations

import contextlib
import io
import socket
import threading
from collections.abc import Callable
from io import BufferedReader
from typing import Any, BinaryIO, cast

from skyctl.records.cluster import Node
from skyctl.remote.base import CommandChannel, NodeConnection

ServeCommand = Callable[[str, BinaryIO, BinaryIO], int]
"""(command, its standard input, its standard output) → exit status."""


class FakeConnection:
    """A node that is a function, run in a thread for every command."""

    def __init__(self, node: Node, serve: ServeCommand, stderr: str = "") -> None:
        self.node = node
        self.host = "127.0.0.1"
        self._serve = serve
        self._stderr = stderr
        self._channels: list[_FakeCommandChannel] = []

    def open(self, command: str) -> CommandChannel:
        """Starts the function."""
        channel = _FakeCommandChannel(self._serve, command, self._stderr)
        self._channels.append(channel)
        return channel

    def close(self) -> None:
        """Ends all of them."""
        while self._channels:
            channel = self._channels.pop()
            channel.close()
            channel.release()

    def detach(self) -> None:
        """The same."""
        self.close()


class _FakeCommandChannel:
    def __init__(self, serve: ServeCommand, command: str, stderr: str) -> None:
        self._ours, theirs = socket.socketpair()
        self.stdin: BinaryIO = cast(BinaryIO, self._ours.makefile("wb", buffering=0))
        self.stdout: BinaryIO = BufferedReader(self._ours.makefile("rb", buffering=0))
        self._stderr = stderr
        self._status: int | None = None

        def run() -> None:
            with theirs, theirs.makefile("rb") as stdin, theirs.makefile("wb") as stdout:
                with contextlib.suppress(OSError, EOFError):
                    self._status = serve(command, stdin, stdout)
                with contextlib.suppress(OSError):
                    stdout.flush()
                    theirs.shutdown(socket.SHUT_RDWR)

        self._thread = threading.Thread(target=run, name="fake node", daemon=True)
        self._thread.start()

    def stderr_tail(self) -> str:
        return self._stderr

    def returncode(self) -> int | None:
        self._thread.join(2)
        return self._status

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._ours.shutdown(socket.SHUT_RDWR)

    def detach(self) -> None:
        self.close()

    def release(self) -> None:
        self._thread.join(5)
        for file in (self.stdin, self.stdout, self._ours):
            with contextlib.suppress(OSError):
                file.close()


class FaultyConnection:
    """Another remote whose output comes as ``fault`` says, from the moment it is set.

    ``None``: as it is. ``"cut"``: half of the next piece, then the end. ``"garbage"``: other bytes.
    ``"silence"``: nothing any more, though the connection stays.
    """

    def __init__(self, inner: NodeConnection) -> None:
        self.node = inner.node
        self.host = inner.host
        self.fault: str | None = None
        self._inner = inner

    def open(self, command: str) -> CommandChannel:
        """Opens it there."""
        channel = self._inner.open(command)
        channel.stdout = BufferedReader(_FaultyReader(self, channel.stdout))
        return channel

    def close(self) -> None:
        """Closes it there."""
        self._inner.close()

    def detach(self) -> None:
        """Hangs up there."""
        self._inner.detach()


class _FaultyReader(io.RawIOBase):
    def __init__(self, remote: FaultyConnection, stdout: Any) -> None:
        self._remote = remote
        self._stdout = stdout
        self._ended = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            data = b"" if self._ended else self._stdout.read1(len(buffer))
            fault = self._remote.fault if data else None
            if fault == "silence":
                continue
            if fault == "cut":
                self._ended = True
                data = data[: len(data) // 2]
            elif fault == "garbage":
                data = b"\xff" * len(data)
            buffer[: len(data)] = data
            return len(data)

    def close(self) -> None:
        self._stdout.close()
        super().close()
