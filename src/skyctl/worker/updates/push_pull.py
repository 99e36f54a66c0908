"""The messages between a worker and its parameter server: gradients there, a grant and weights back.

A grant is the root's permission to begin the next clock. A push is a head (whether the worker was told to
end, and which parameters have a gradient) and the numbers in chunks; the answer is a head (``Grant``) and the
weights in chunks. Every message says which clock it is of (``sum_messages``), so that a mix-up or a lie is an
error, and not a wrong sum.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from skyctl.worker.peer import Peer
from skyctl.worker.sums.sum_messages import (
    DOWN,
    GRADIENTS,
    GRANT,
    UP,
    WEIGHTS,
    IncomingMessages,
    OutgoingMessages,
    SumMessage,
    SumStamp,
)
from skyctl.worker.updates.parameter_root import Grant

Tensor = torch.Tensor
NUMBER_BYTES = 4
_GRANT = struct.Struct("=qqd")
_NO_END = -1


class Push(NamedTuple):
    """A push's head: ``present`` has a 1 for each parameter that has a gradient, else a 0."""

    wants_end: bool
    present: bytes


class PushPull:
    """One end of a worker's line to its root.

    Args:
        group: the sync group's number in the plan.
        first_tag: the first of four tags that nothing else has.
        numel: numbers of all parameters together; ``parameters``: how many these are.
        chunk_bytes: of numbers in a message, at most.
    """

    def __init__(
        self,
        peer: Peer,
        *,
        group: int,
        first_tag: int,
        numel: int,
        parameters: int,
        chunk_bytes: int,
    ) -> None:
        self._peer, self._group, self._tag = peer, group, first_tag
        self._parameters = parameters
        step = max(1, chunk_bytes // NUMBER_BYTES)
        self._chunks = [(at, min(numel, at + step)) for at in range(0, numel, step)]

    def send_push(self, clock: int, push: Push, gradients: Tensor) -> None:
        """Sends a clock's gradients: float32 in a row; returns once all has left."""
        self._send(clock, UP, GRADIENTS, bytes([push.wants_end]) + push.present, gradients)

    def receive_push(self, clock: int, out: Tensor) -> Push:
        """Receives a clock's gradients into ``out``.

        Raises:
            PeerLostError: the worker is gone.
            PeerProtocolError: it has sent something else than this clock's gradients.
        """
        head = self._receive(clock, UP, GRADIENTS, 1 + self._parameters, _push_fault, out)
        return Push(bool(head[0]), head[1:])

    def send_answer(self, clock: int, grant: Grant, weights: Tensor) -> None:
        """Answers the push of a clock."""
        end = _NO_END if grant.end is None else grant.end
        self._send(clock, DOWN, WEIGHTS, _GRANT.pack(end, grant.slowest, grant.held_s), weights)

    def receive_answer(self, clock: int, out: Tensor, *, staleness: int | None, steps: int) -> Grant:
        """Receives the answer to a push, and the weights into ``out``.

        Args:
            staleness: as the root has it; it can't grant more.
            steps: of the run.

        Raises:
            PeerLostError: the root is gone.
            PeerProtocolError: it has sent something else.
        """

        def fault(head: bytes) -> str | None:
            end, slowest, held_s = _GRANT.unpack(head)
            if end != _NO_END and not clock <= end < steps:
                return f"an end after clock {end}"
            if not 0 <= slowest <= clock + 1:
                return f"a slowest worker that has finished {slowest} clocks"
            if staleness is not None and clock + 1 - slowest > staleness:
                return f"a grant to be {clock + 1 - slowest} clocks ahead, {staleness} at most"
            return None if math.isfinite(held_s) and held_s >= 0.0 else f"{held_s} seconds"

        head = self._receive(clock, DOWN, WEIGHTS, _GRANT.size, fault, out)
        end, slowest, held_s = _GRANT.unpack(head)
        return Grant(None if end == _NO_END else end, slowest, held_s)

    def _send(self, clock: int, direction: int, kind: int, head: bytes, numbers: Tensor) -> None:
        message = SumMessage(len(head))
        message.fill(head)
        message.stamp(self._stamp(GRANT, clock, direction, 0, len(head)))
        first = OutgoingMessages([self._peer], self._tag + direction)
        first.send(message)
        outgoing = OutgoingMessages([self._peer], self._tag + 2 + direction)
        for stamp, (start, stop) in zip(self._stamps(kind, clock, direction), self._chunks, strict=True):
            chunk = outgoing.take(stamp.nbytes)
            chunk.payload.view(torch.float32).copy_(numbers[start:stop])
            chunk.stamp(stamp)
            outgoing.send(chunk)
        first.drain()
        outgoing.drain()

    def _receive(
        self,
        clock: int,
        direction: int,
        kind: int,
        head_bytes: int,
        fault: Callable[[bytes], str | None],
        out: Tensor,
    ) -> bytes:
        stamp = self._stamp(GRANT, clock, direction, 0, head_bytes)
        heads = IncomingMessages(
            self._peer,
            self._tag + direction,
            [stamp],
            lambda _, payload: fault(bytes(payload.tolist())),
        )
        stamps = self._stamps(kind, clock, direction)
        chunks = IncomingMessages(self._peer, self._tag + 2 + direction, stamps)
        head = heads.take().payload_bytes
        for start, stop in self._chunks:
            message = chunks.take()
            out[start:stop].copy_(message.payload.view(torch.float32))
            chunks.release(message)
        return head

    def _stamps(self, kind: int, clock: int, direction: int) -> Sequence[SumStamp]:
        return [
            self._stamp(kind, clock, direction, place, NUMBER_BYTES * (stop - start))
            for place, (start, stop) in enumerate(self._chunks)
        ]

    def _stamp(self, kind: int, clock: int, direction: int, chunk: int, nbytes: int) -> SumStamp:
        return SumStamp(kind, clock, self._group, 0, direction, chunk, nbytes)


def _push_fault(head: bytes) -> str | None:
    return "marks above 1" if max(head) > 1 else None
