"""A rank has the others agree to go on without it, and ends before all have heard so: they still agree.

The memberships are the real ones, over real connections, in threads of this process; no sums are made.
"""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.helpers.processes import until
from tests.worker.sums import connected

from skyctl.errors import RunError
from skyctl.worker.elastic.membership import Membership
from skyctl.worker.elastic.witness import QuorumWitness
from skyctl.worker.member_messages import Accept, Chosen, Generation, MemberMessage, Prepare, StatePart
from skyctl.worker.peer import Peer
from skyctl.worker.rank_events import WitnessAskedEvent

PIPELINES = {0: 0, 1: 0, 2: 2, 3: 2}
FIRST = Generation(0, (0, 1, 2, 3), {0: (0, 2), 2: (2, 4)})
ALL_PAIRS = [(1.0, 0, list(itertools.combinations(PIPELINES, 2)), ())]
STEPS, LOST_AT = 6, 3
LIMIT_S = 20.0
"""A rank that has not ended by then hangs."""


class Members(list[Membership]):
    """By rank; ``close`` in any case."""

    def __init__(self, ends: list[dict[int, Peer]], *, has_witness: bool) -> None:
        self._launcher, self._witness = ThreadPoolExecutor(1), QuorumWitness()
        for rank, peers in enumerate(ends):

            def ask(message: MemberMessage, rank: int = rank) -> None:
                self._launcher.submit(self._answer, rank, message)

            witness = ask if has_witness else None
            self.append(
                Membership(
                    rank,
                    FIRST,
                    4,
                    peers,
                    pipelines=PIPELINES,
                    ask_witness=witness,
                    on_change=lambda _number: None,
                )
            )

    def _answer(self, rank: int, message: MemberMessage) -> None:
        if isinstance(message, Prepare):
            answer = self._witness.answer(WitnessAskedEvent(prepare=message))
        else:
            assert isinstance(message, Accept)
            answer = self._witness.answer(WitnessAskedEvent(accept=message))
        told = answer.promise or answer.accepted or answer.refused
        assert told is not None
        self[rank].take_witness(told)

    def close(self) -> None:
        for one in self:
            one.close()
        self._launcher.shutdown()


def falls_silent_as_it_leaves(members: Members, peers: dict[int, Peer], unheard: set[int]) -> None:
    """Rank 0 tells the next generation to the others alone, once they know whom it does not reach."""
    lines = members[0]._lines
    send = lines.send

    def lossy(rank: int, message: MemberMessage) -> None:
        if isinstance(message, Chosen):
            for other in unheard:
                peers[other].close()
            if rank in unheard:
                return
            cut = {(0, other) for other in unheard}
            until(lambda: members[rank].generation.number or cut <= members[rank]._agreement._edges)
            send(rank, message)
            until(lambda: members[rank].generation.number)
        else:
            send(rank, message)

    lines.send = lossy  # type: ignore[method-assign]


@pytest.mark.parametrize("has_witness", [True, False])
@pytest.mark.parametrize("unheard", [{2}, {3}, {2, 3}], ids=str)
def test_those_that_are_left_go_on_together_or_end(unheard: set[int], has_witness: bool) -> None:
    with connected(ALL_PAIRS, 4) as ends:
        members = Members(ends, has_witness=has_witness)
        falls_silent_as_it_leaves(members, ends[0], unheard)

        made: dict[int, list[int]] = {rank: [] for rank in PIPELINES}
        errors: dict[int, str] = {}

        def part(rank: int) -> None:
            mine = members[rank]
            try:
                for step in range(LOST_AT if rank == 1 else STEPS):
                    if step == LOST_AT and rank == 0:
                        threads[1].join()
                        mine.lose(1)
                        mine.wait_change(0)
                    while not mine.vote(mine.generation.number, step, {0: f"{step:032x}"}):
                        pass
                    made[rank].append(step)
                if rank > 1:
                    mine.leave()
            except RunError as exc:
                errors[rank] = exc.message
            if rank <= 1 or errors.get(rank):
                mine.close()

        for one in members:
            one.start()
        threads = [threading.Thread(target=part, args=(rank,), daemon=True) for rank in PIPELINES]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        hung = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
        members.close()
    assert hung == []
    assert "not all of its pipeline is left" in errors.pop(0)
    if has_witness or len(unheard) == 1:
        assert errors == {}
        assert made[2] == made[3] == list(range(STEPS))
        assert [one.generation.members for one in members[2:]] == [(2, 3)] * 2
    else:
        assert errors.keys() == {2, 3}
        assert "are not more than half of 4 members" in errors[2]


def test_members_need_no_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node may have torch alone."""

    def is_not_there(_tensor: torch.Tensor) -> None:
        raise RuntimeError("Numpy is not available")

    monkeypatch.setattr(torch.Tensor, "numpy", is_not_there)
    parts: dict[int, bytes] = {}
    with connected(ALL_PAIRS, 4) as ends:
        members = Members(ends, has_witness=False)
        members[3]._on_part = lambda rank, _part, data: parts.update({rank: data})
        for one in members:
            one.start()
        try:
            assert members[0].send_part(3, StatePart(0, None, 3), b"abc")
            until(lambda: parts == {0: b"abc"}, patience_s=LIMIT_S)
        finally:
            members.close()
