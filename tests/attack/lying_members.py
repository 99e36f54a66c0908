"""Three ranks of a run that survives who leaves, one of which sends hostile messages over its own lines.

The memberships are the real ones, over real connections, in threads of this process; no sums are made: a
step's digest is its number. The liar makes steps as the others do, and says more than they do.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from skyctl.agent.message_fields import write_fields
from skyctl.errors import RunError
from skyctl.worker.elastic.member_lines import _SIZE_TAG, _TEXT_TAG
from skyctl.worker.elastic.membership import Membership
from skyctl.worker.member_messages import Generation, MemberMessage
from skyctl.worker.peer import Peer

from ..worker.sums import connected, ring

COUNT, MICROBATCHES, STEPS, LIE_AT = 3, 6, 8, 3
SHARES = {0: (0, 2), 1: (2, 4), 2: (4, 6)}
LIMIT_S = 20.0
"""A rank that has not ended by then hangs."""
Lie = Callable[["Teller"], None]


@dataclass(frozen=True)
class Teller:
    """The liar's line to one honest rank, and the lock of whoever writes on it: its signs of life go on."""

    peer: Peer
    lock: threading.Lock

    def says(self, *messages: MemberMessage) -> None:
        for message in messages:
            self.writes(json.dumps({"kind": message.kind} | write_fields(message)).encode())

    def writes(self, text: bytes) -> None:
        with self.lock:
            self.announces(len(text))
            self.peer.send(torch.frombuffer(bytearray(text), dtype=torch.uint8), _TEXT_TAG)

    def announces(self, nbytes: int) -> None:
        self.peer.send(torch.tensor([nbytes], dtype=torch.int64), _SIZE_TAG)


@dataclass
class Outcome:
    """The outcome of a lie.

    Attributes:
        applied: by rank, steps whose sum took effect, in order.
        early: honest ranks that applied the step at which the lie was told before all had voted for it.
        errors: by rank, what it ended with.
        members: by rank, those of its last generation.
        stuck: ranks that had not ended in time.
    """

    applied: dict[int, list[int]] = field(default_factory=lambda: {rank: [] for rank in range(COUNT)})
    early: list[int] = field(default_factory=list)
    errors: dict[int, RunError] = field(default_factory=dict)
    members: dict[int, tuple[int, ...]] = field(default_factory=dict)
    stuck: list[int] = field(default_factory=list)


def play(liar: int, lie: Lie) -> Outcome:
    """The lie is told to every other rank while the last honest one has not voted for that step yet."""
    outcome = Outcome()
    late = max(rank for rank in range(COUNT) if rank != liar)
    told, may_vote = threading.Event(), threading.Event()
    with connected(ring(COUNT), COUNT) as ends:
        members = {rank: _membership(rank, ends[rank]) for rank in range(COUNT)}

        def part(rank: int) -> None:
            try:
                for step in range(STEPS):
                    if step == LIE_AT and rank == liar:
                        try:
                            for other, peer in ends[rank].items():
                                lie(Teller(peer, members[rank]._lines._locks[other]))
                        finally:  # whoever heard it first may have had it left out before the next is told
                            told.set()
                    if step == LIE_AT and rank == late:
                        may_vote.wait(LIMIT_S)
                    while not members[rank].vote(members[rank].generation.number, step, {0: f"{step:032x}"}):
                        pass
                    outcome.applied[rank].append(step)
                members[rank].leave()
            except RunError as exc:
                outcome.errors[rank] = exc
                members[rank].close()

        for one in members.values():
            one.start()
        threads = [threading.Thread(target=part, args=(rank,), daemon=True) for rank in range(COUNT)]
        for thread in threads:
            thread.start()
        assert told.wait(LIMIT_S)
        threads[late].join(0.5)  # for what was said to be heard
        outcome.early = [rank for rank in range(COUNT) if rank != liar and LIE_AT in outcome.applied[rank]]
        may_vote.set()
        for rank, thread in enumerate(threads):
            thread.join(LIMIT_S if rank != liar else 1.0)
            if thread.is_alive() and rank != liar:
                outcome.stuck.append(rank)
        outcome.members = {rank: one.generation.members for rank, one in members.items()}
        for one in members.values():
            one.close()
        threads[liar].join(LIMIT_S)
    return outcome


def _membership(rank: int, peers: dict[int, Peer]) -> Membership:
    first = Generation(0, tuple(range(COUNT)), SHARES)
    return Membership(
        rank,
        first,
        MICROBATCHES,
        peers,
        pipelines={other: other for other in range(COUNT)},
        ask_witness=None,
        on_change=lambda _number: None,
    )
