"""The messages of sums over routes: a header that says what it is, and a chunk of numbers behind it.

Both are in one piece of memory, so that a rank can send on what it has received, as it is. A mix-up is an
error, and not a wrong sum.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from skyctl.transport.work import Work
from skyctl.worker.peer import Peer

GRADIENTS, FIGURES, AGREEMENT, FACTORS, WEIGHTS, GRANT, DIFFERENCES = range(7)
"""Kinds of messages: chunks of gradients, of other figures, what all ranks agree on, chunks of what is summed
in a second pass (``low_rank_gradients``), chunks of weights, what a parameter server says with them
(``push_pull``), and chunks of what weights have changed by in a round (``weight_average``)."""
UP, DOWN = range(2)
"""Towards the root, and from it."""
HEADER = struct.Struct("=8q")
"""A ``SumStamp``, and a zero."""
AHEAD_BYTES = 2 << 20
"""Of one edge's messages are received ahead, and sent before the first has left, two at least. The word that
a further one may come waits behind what this end sends over the same line. And an end under a CPU quota
stands still for 8 ms at a time: a line of 1 Gbit/s carries 1 MB meanwhile, and with 512 KiB was idle for
half of the time (docs/probing.md)."""
_LEAST_UNDER_WAY = 2
_KIND_NAMES = ("gradients", "running figures", "agreement", "factors", "weights", "grant", "differences")
_DIRECTION_NAMES = ("up", "down")


class SumStamp(NamedTuple):
    """The entries by which a message says what it is; ``nbytes``: of its payload."""

    kind: int
    step: int
    group: int
    route: int
    direction: int
    chunk: int
    nbytes: int

    def __str__(self) -> str:
        return (
            f"{_name(self.kind, _KIND_NAMES)} of step {self.step}, group {self.group}, route {self.route} "
            f"{_name(self.direction, _DIRECTION_NAMES)}, chunk {self.chunk} ({self.nbytes} bytes)"
        )


def _name(number: int, names: Sequence[str]) -> str:
    return names[number] if 0 <= number < len(names) else f"unknown ({number})"


class SumMessage:
    """A buffer for one message with a payload of so many bytes.

    Attributes:
        tensor: all of it, bytes in host memory.
        payload: the payload, bytes in the same memory.
    """

    def __init__(self, nbytes: int) -> None:
        self._memory = bytearray(HEADER.size + nbytes)
        self.tensor = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.payload = self.tensor[HEADER.size :]

    @property
    def nbytes(self) -> int:
        """The payload's bytes."""
        return len(self._memory) - HEADER.size

    @property
    def payload_bytes(self) -> bytes:
        """A copy of the payload."""
        return bytes(self._memory[HEADER.size :])

    def fill(self, payload: bytes) -> None:
        """Sets the payload, of just that size."""
        self._memory[HEADER.size :] = payload

    def stamp(self, stamp: SumStamp) -> None:
        """Writes the header."""
        HEADER.pack_into(self._memory, 0, *stamp, 0)

    def check(self, expected: SumStamp, peer: Peer) -> None:
        """Raises PeerProtocolError where the header of what has arrived from the peer is another."""
        stamp = SumStamp(*HEADER.unpack_from(self._memory)[:-1])
        if stamp != expected:
            raise peer.protocol_error(f"sent {stamp}; expected were {expected}")


class IncomingMessages:
    """The messages of one tag from one peer, in their order, received ``AHEAD_BYTES`` ahead.

    Args:
        stamps: what each must say of itself.
        fault: given a message's place and payload, says what is in there that no honest peer sends.
    """

    def __init__(
        self,
        peer: Peer,
        tag: int,
        stamps: Sequence[SumStamp],
        fault: Callable[[int, torch.Tensor], str | None] = lambda _place, _payload: None,
    ) -> None:
        self._peer, self._tag, self._stamps, self._fault = peer, tag, stamps, fault
        self._posted: deque[tuple[SumMessage, Work]] = deque()
        self._free: list[SumMessage] = []
        self._posted_count = self._taken_count = 0
        self.under_way = messages_under_way(stamps)
        for _ in range(min(len(stamps), self.under_way)):
            self._post()

    def take(self) -> SumMessage:
        """Waits for the next message; to be released.

        Raises:
            PeerLostError: the sender is gone.
            PeerProtocolError: this is another message than the one expected, or one with a fault.
            RunError: the transfer failed.
        """
        message, work = self._posted.popleft()
        work.wait()
        stamp = self._stamps[self._taken_count]
        message.check(stamp, self._peer)
        if (fault := self._fault(self._taken_count, message.payload)) is not None:
            raise self._peer.protocol_error(f"sent {stamp} with {fault}")
        self._taken_count += 1
        return message

    def release(self, message: SumMessage) -> None:
        """The message is not needed any more: a further one is received."""
        self._free.append(message)
        self._post()

    def _post(self) -> None:
        if self._posted_count < len(self._stamps):
            message = _take_buffer(self._free, self._stamps[self._posted_count].nbytes)
            self._posted.append((message, self._peer.recv(message.tensor, self._tag)))
            self._posted_count += 1


class OutgoingMessages:
    """Sends each message to all of some peers, while the next is made.

    Args:
        under_way: so many are under way at most. Messages that are sent on as they were received come back to
            be received into only then: no more than ``IncomingMessages.under_way`` of these, or none is left.
        release: called with each message that has left; None: it is kept, to be taken again.
    """

    def __init__(
        self,
        peers: Sequence[Peer],
        tag: int,
        release: Callable[[SumMessage], None] | None = None,
        *,
        under_way: int = _LEAST_UNDER_WAY,
    ) -> None:
        self._peers, self._tag, self._under_way = peers, tag, under_way
        self._free: list[SumMessage] = []
        self._release = release or self._free.append
        self._pending: deque[tuple[SumMessage, list[Work]]] = deque()

    def take(self, nbytes: int) -> SumMessage:
        """A message to be filled and sent."""
        return _take_buffer(self._free, nbytes)

    def send(self, message: SumMessage) -> None:
        """Starts sending; waits until there is room for the next."""
        works = [peer.send(message.tensor, self._tag) for peer in self._peers]
        self._pending.append((message, works))
        while len(self._pending) >= self._under_way or (self._pending and not works):
            self._finish_oldest()

    def drain(self) -> None:
        """Waits until everything has left."""
        while self._pending:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        message, works = self._pending.popleft()
        for work in works:
            work.wait()
        self._release(message)


def messages_under_way(stamps: Sequence[SumStamp]) -> int:
    """How many of these messages are under way on an edge at a time, by the largest of them."""
    return max(_LEAST_UNDER_WAY, AHEAD_BYTES // max((1, *(stamp.nbytes for stamp in stamps))))


def _take_buffer(free: list[SumMessage], nbytes: int) -> SumMessage:
    """A free buffer of that size, or a new one; those of another size are dropped."""
    while free:
        message = free.pop()
        if message.nbytes == nbytes:
            return message
    return SumMessage(nbytes)
