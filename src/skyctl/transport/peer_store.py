"""A key-value store of two ranks over one authenticated socket: how Gloo's ends, and NCCL's, find each other.

Each end sends what it sets to the other, and waits for what it misses: there is no server, and so nothing
that a third party could reach. A frame is two 32-bit lengths (big-endian), the key and the value.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_c10d: Any = dist  # what follows is not in torch's type stubs
_KEY_VALUE_LENGTHS = struct.Struct(">II")
_MAX_VALUE_BYTES = 1 << 20
_READ_BYTES = 1 << 16


class PeerStore(_c10d.Store):  # type: ignore[misc]
    """What both ends have set, as a torch ``Store``. Whoever made the socket closes it."""

    def __init__(self, sock: socket.socket, limit_s: float) -> None:
        super().__init__()
        self._sock, self._limit_s = sock, limit_s
        self._values: dict[str, bytes] = {}
        self._arrived = bytearray()
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._reading, self._writing = threading.RLock(), threading.Lock()

    def set(self, key: str, value: bytes | str) -> None:
        """Sets the key here, and sends it to the other end."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        name = key.encode()
        self._values[key] = data
        with self._writing:
            self._sock.sendall(_KEY_VALUE_LENGTHS.pack(len(name), len(data)) + name + data)

    def get(self, key: str) -> bytes:
        """The key's value; waits until either end has set it."""
        self.wait([key])
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Waits until every key is set.

        Raises:
            TimeoutError: one of them is not.
            OSError: the connection is gone.
        """
        limit_s = self._limit_s if timeout is None else timeout.total_seconds()
        deadline = time.monotonic() + limit_s
        with self._reading:
            while missing := [key for key in keys if key not in self._values]:
                if not self._read(deadline - time.monotonic()):
                    raise TimeoutError(f"timed out after {limit_s:.0f} s waiting for {missing[0]}")

    def check(self, keys: list[str]) -> bool:
        """Whether every key is set; does not wait. A connection that is gone brings nothing more."""
        with self._reading, suppress(OSError):
            while self._read(0.0):
                pass
        return all(key in self._values for key in keys)

    def _read(self, wait_s: float) -> bool:
        """Reads what has arrived, or arrives within that time; False where nothing did."""
        if wait_s < 0 or not self._poll.poll(1000 * wait_s):
            return False
        data = self._sock.recv(_READ_BYTES)
        if not data:
            raise ConnectionResetError("Connection closed by peer")
        self._arrived += data
        while len(self._arrived) >= _KEY_VALUE_LENGTHS.size:
            key_bytes, value_bytes = _KEY_VALUE_LENGTHS.unpack_from(self._arrived)
            if max(key_bytes, value_bytes) > _MAX_VALUE_BYTES:
                raise ConnectionError("the peer does not speak as it should")
            middle = _KEY_VALUE_LENGTHS.size + key_bytes
            if len(self._arrived) < middle + value_bytes:
                break
            key = self._arrived[_KEY_VALUE_LENGTHS.size : middle].decode()
            self._values[key] = bytes(self._arrived[middle : middle + value_bytes])
            del self._arrived[: middle + value_bytes]
        return True
