"""Collectives of one pipeline's stages: single numbers, summed and broadcast between neighbours alone.

Only planned pairs are connected, so the tree that a sum goes over is the pipeline itself: partial sums go up
to the first stage, and the sum comes down again. Stages end their backwards in that order anyway, so sums
hardly make anyone wait; on the way down a number arrives just ahead of the next step's first activations.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

from skyctl.transport.work import Work
from skyctl.worker.peer import Neighbours, Peer
from skyctl.worker.progress import Progress

STAGE_GROUP_TAGS = 2
"""One for each direction."""
_UP, _DOWN = range(2)


class Waited(NamedTuple):
    """How long a collective waited: for other stages (``idle_s``), and for the network (``transfer_s``)."""

    idle_s: float
    transfer_s: float


class StageGroup:
    """The stages of a pipeline; all call the same collectives in the same order, as in torch.distributed.

    A tensor holds one float64 number. It is sent behind the collective's number, counted from 0.

    Args:
        neighbours: the stages before and after this one.
        tag: the first of ``STAGE_GROUP_TAGS`` that no other message between two stages has.
        progress: told when this stage waits.
    """

    def __init__(self, neighbours: Neighbours, tag: int, progress: Progress) -> None:
        self._previous, self._following = neighbours
        self._tag, self._progress = tag, progress
        self._count = 0
        self._posted: dict[int, tuple[torch.Tensor, Work]] = {}
        self._pending: list[tuple[torch.Tensor, Work]] = []

    def all_reduce(self, tensor: torch.Tensor) -> Waited:
        """As ``dist.all_reduce``: the sum over all stages takes the number's place.

        Each stage adds its own number to the sum of those after it, so the order is the pipeline's.

        Raises:
            PeerLostError: a neighbour is gone.
            PeerProtocolError: it has sent the number of another collective.
        """
        idle_s = transfer_s = 0.0
        if self._following is not None:
            part = torch.empty_like(tensor)
            idle_s, transfer_s = self._receive(self._following, _UP, part)
            tensor.add_(part)
        if self._previous is not None:
            self._send(self._previous, _UP, tensor)
        waited = self.broadcast(tensor)
        return Waited(idle_s + waited.idle_s, transfer_s + waited.transfer_s)

    def broadcast(self, tensor: torch.Tensor) -> Waited:
        """As ``dist.broadcast`` from the first stage, whose number takes the place of the others'.

        Raises: as ``all_reduce``.
        """
        waited = Waited(0.0, 0.0)
        if self._previous is not None:
            waited = self._receive(self._previous, _DOWN, tensor)
        if self._following is not None:
            self._send(self._following, _DOWN, tensor)
        self._count += 1
        return waited

    def drain(self) -> None:
        """Waits until everything that was sent has left."""
        for _, work in self._pending:
            work.wait()
        self._pending.clear()

    def _send(self, neighbour: Peer, direction: int, tensor: torch.Tensor) -> None:
        if len(self._pending) > STAGE_GROUP_TAGS:
            self.drain()  # sent in the collective before, and answered long since
        message = torch.cat([tensor.new_tensor([self._count]), tensor])
        self._pending.append((message, neighbour.send(message, self._tag + direction)))

    def _receive(self, neighbour: Peer, direction: int, tensor: torch.Tensor) -> Waited:
        if direction not in self._posted:
            self._post(neighbour, direction)
        message, work = self._posted[direction]
        began = time.perf_counter()
        with self._progress.waits():
            work.wait()
        waited_s = time.perf_counter() - began
        number, value = message.tolist()
        self._post(neighbour, direction)  # ahead of the next collective: its sender waits for that
        if number != self._count:
            raise neighbour.protocol_error(
                f"sent a number of its collective {number:g} over the pipeline's stages; this one is at its "
                f"collective {self._count}"
            )
        tensor.fill_(value)
        transfer_s = min(waited_s, neighbour.latency_s)
        return Waited(waited_s - transfer_s, transfer_s)

    def _post(self, neighbour: Peer, direction: int) -> None:
        message = torch.empty(2, dtype=torch.float64)
        self._posted[direction] = message, neighbour.recv(message, self._tag + direction)
