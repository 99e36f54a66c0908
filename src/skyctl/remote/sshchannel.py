"""A paramiko channel as one of ours: raw files that never wait for the 2 MiB window with output unread."""

from __future__ import annotations

import contextlib
import io
from typing import Any, BinaryIO, cast

from skyctl.remote.base import Tail


class SshChannel:
    """A command on a node as a channel."""

    def __init__(self, channel: Any, name: str) -> None:
        self._channel = channel
        self.stdin: BinaryIO = cast(BinaryIO, _Writer(channel))
        self.stdout: BinaryIO = io.BufferedReader(_Reader(channel.recv), 1 << 18)
        self._tail = Tail(cast(BinaryIO, _Reader(channel.recv_stderr)), name)

    def stderr_tail(self) -> str:
        """The last of what the command wrote to standard error."""
        return self._tail.text()

    def returncode(self) -> int | None:
        """The exit status, waited for up to 2 s; None where there is none (a signal, a lost connection)."""
        self._channel.status_event.wait(2)
        status = int(self._channel.exit_status)
        return status if status >= 0 else None

    def close(self) -> None:
        """Closes it; readers and writers wake."""
        with contextlib.suppress(Exception):
            self._channel.close()  # whatever it brings up, it is closed

    def hang_up(self) -> None:
        """The same: sshd leaves the command to itself."""
        self.close()


class _Reader(io.RawIOBase):
    def __init__(self, receive: Any) -> None:
        self._receive = receive

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._receive(len(buffer))
        buffer[: len(data)] = data
        return len(data)


class _Writer(io.RawIOBase):
    def __init__(self, channel: Any) -> None:
        self._channel = channel

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return int(self._channel.send(bytes(memoryview(data)[: 1 << 15]))) if len(data) else 0
