"""Another rank of the run, as a rank talks to it: over torch.distributed, whatever the backend."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from skyctl.transport.planned_process_group import PEER_READY_TIMEOUT_S
from skyctl.transport.transfer_errors import PeerProtocolError
from skyctl.transport.work import Work

CLOCK_TAG = 0
PING_TAG = 1
FIRST_STREAM_TAG = 16
"""Of the messages between stages, and what goes with them; smaller tags are a pair's own."""
_READY = timedelta(seconds=PEER_READY_TIMEOUT_S)
FIRST_SUM_TAG = 1 << 24
"""Of sums; a group's ``first_tag`` counts from it."""


def stage_group_tag(microbatches: int) -> int:
    """The first tag after those of a pipeline's streams, which were made for so many microbatches."""
    return FIRST_STREAM_TAG + 2 * microbatches


class Peer:
    """A rank that this one exchanges tensors with.

    Attributes:
        rank: its number in the group.
        name: what to call it in an error, such as ``rank 2 (10.0.0.7)``.
        latency_s: seconds that a small message takes to it, or from it.
    """

    __slots__ = ("_group", "latency_s", "name", "rank")

    def __init__(self, group: dist.ProcessGroup, rank: int, name: str = "", latency_s: float = 0.0) -> None:
        self._group: Any = group
        self.rank, self.name, self.latency_s = rank, name or f"rank {rank}", latency_s

    def send(self, tensor: torch.Tensor, tag: int) -> Work:
        """As ``dist.isend``: starts sending; the tensor must not change before the work is done."""
        work: Work = self._group.send([tensor], self.rank, tag)
        return work

    def recv(self, tensor: torch.Tensor, tag: int) -> Work:
        """As ``dist.irecv``: starts receiving into a contiguous tensor, filled when the work is done."""
        work: Work = self._group.recv([tensor], self.rank, tag)
        return work

    def together(self) -> AbstractContextManager[None]:
        """Starts all that is exchanged within it together, at its end, where the backend can."""
        together = getattr(self._group, "together", None)
        return nullcontext() if together is None else together(self.rank)

    def protocol_error(self, fault: str) -> PeerProtocolError:
        """The error for what the peer has sent; ``fault`` goes on from its name ("sent step 3, …")."""
        return PeerProtocolError(f"{self.name} {fault}", peer_rank=self.rank)

    def measure_latency(self, rounds: int = 5) -> None:
        """Sets ``latency_s`` to half of the shortest of so many round trips; both ends must call it alike."""
        asks = self._group.rank() < self.rank
        times = []
        for _ in range(rounds):
            there, back = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
            answer = self.recv(back, PING_TAG)
            if not asks:
                answer.wait(_READY)
                self.send(there, PING_TAG).wait(_READY)
            else:
                start = time.perf_counter()
                question = self.send(there, PING_TAG)
                answer.wait(_READY)
                times.append(time.perf_counter() - start)
                question.wait(_READY)
        result = torch.tensor([min(times) if times else 0.0], dtype=torch.float64)
        (self.send if asks else self.recv)(result, PING_TAG).wait(_READY)
        self.latency_s = float(result.item()) / 2

    def close(self) -> None:
        """Ends what is under way with it, now: this rank has failed, and the other one is to know."""
        self._group.close_pair(self.rank)


class Neighbours(NamedTuple):
    """The ranks before and after one in its pipeline; None: there is none."""

    previous: Peer | None
    following: Peer | None
