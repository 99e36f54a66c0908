"""A key-value store of two ranks over their own connection: how NCCL's two ends find each other.

Each end sends what it sets to the other, and waits for what it misses: there is no server, and so nothing
that a third party could reach. An entry is one message of ``ENTRY_BYTES``: two 32-bit lengths (big-endian),
the key and the value.
"""

from __future__ import annotations

import struct
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from skyctl.transport.message_transport import MessageTransport

ENTRY_BYTES = 4096
_c10d: Any = dist  # what follows is not in torch's type stubs
_KEY_VALUE_LENGTHS = struct.Struct(">II")


class PeerStore(_c10d.Store):  # type: ignore[misc]
    """The keys and values that both ends have set, as a torch ``Store``.

    Args:
        transport: stays the caller's to close.
        tag: the messages', used for nothing else.
        limit_s: how long ``get`` waits, and ``wait`` where it is not told.
    """

    def __init__(self, transport: MessageTransport, tag: int, limit_s: float) -> None:
        super().__init__()
        self._transport, self._tag, self._limit_s = transport, tag, limit_s
        self._values: dict[str, bytes] = {}
        self._reading = threading.RLock()
        self._post()

    def set(self, key: str, value: bytes | str) -> None:
        """Sets the key here, and sends it to the other end.

        Raises:
            ValueError: key and value do not fit into an entry.
            RuntimeError: the connection is gone.
        """
        name, data = key.encode(), value.encode() if isinstance(value, str) else bytes(value)
        entry = _KEY_VALUE_LENGTHS.pack(len(name), len(data)) + name + data
        if len(entry) > ENTRY_BYTES:
            raise ValueError(f"{key!r:.80} and its value have {len(entry)} bytes; {ENTRY_BYTES} are the most")
        self._values[key] = data
        message = torch.frombuffer(bytearray(entry.ljust(ENTRY_BYTES, b"\0")), dtype=torch.uint8)
        self._transport.send(message, self._tag)

    def get(self, key: str) -> bytes:
        """The key's value; waits until either end has set it."""
        self.wait([key])
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Waits until every key is set.

        Raises:
            TimeoutError: one of them is not.
            RuntimeError: the connection is gone.
        """
        limit_s = self._limit_s if timeout is None else timeout.total_seconds()
        deadline = time.monotonic() + limit_s
        with self._reading:
            while missing := [key for key in keys if key not in self._values]:
                if not self._read(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"timed out after {limit_s:.0f} s waiting for {missing[0]}")

    def check(self, keys: list[str]) -> bool:
        """Whether every key is set; does not wait. A connection that is gone brings nothing more."""
        with self._reading, suppress(RuntimeError):
            while self._read(0.0):
                pass
        return all(key in self._values for key in keys)

    def _post(self) -> None:
        self._entry = bytearray(ENTRY_BYTES)
        self._posted = self._transport.recv(torch.frombuffer(self._entry, dtype=torch.uint8), self._tag)

    def _read(self, wait_s: float) -> bool:
        """Takes the next entry, if it is there within that time; False where it is not."""
        if not self._posted.is_over(wait_s):
            return False
        self._posted.wait(timedelta())
        key_bytes, value_bytes = _KEY_VALUE_LENGTHS.unpack_from(self._entry)
        middle = _KEY_VALUE_LENGTHS.size + key_bytes
        if middle + value_bytes > ENTRY_BYTES:
            raise RuntimeError("the peer does not speak as it should")
        key = bytes(self._entry[_KEY_VALUE_LENGTHS.size : middle]).decode(errors="replace")
        self._values[key] = bytes(self._entry[middle : middle + value_bytes])
        self._post()
        return True
