"""The ranks that make what is missing, and the silence that counts as a lost line."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist

from skyctl.transport.planned_process_group import PairOptions
from skyctl.transport.process_group import run_in_thread, wait_for_all
from skyctl.transport.torch_backend import make_group
from skyctl.transport.transfer_errors import PeerProtocolError
from skyctl.worker.elastic.elastic_steps import SumConnections
from skyctl.worker.elastic.member_lines import Arrivals, MemberLines, read_message
from skyctl.worker.elastic.microbatch_shares import Paces, deal, even_shares, hand_out, ranges_of
from skyctl.worker.elastic.next_generation import next_generation
from skyctl.worker.member_messages import Generation, MemberMessage, Promise, Trouble
from skyctl.worker.peer import Peer

DIGEST = "0" * 32


def test_missing_microbatches_go_to_whoever_is_done_first() -> None:
    assert deal(6, {0: 1.0, 1: 2.0}, {}) == {0: 4, 1: 2}
    assert deal(3, {0: 1.0, 1: 1.0}, {0: 5.0}) == {0: 0, 1: 3}
    assert hand_out([2, 3, 7], {0: 0, 1: 2, 4: 1}) == {1: ((2, 4),), 4: ((7, 8),)}
    assert ranges_of({4, 1, 2, 9}) == ((1, 3), (4, 5), (9, 10))


@pytest.mark.parametrize("microbatches", [1, 2, 3, 8, 50])
def test_shares_cover_a_step_and_nobody_is_idle_who_need_not_be(microbatches: int) -> None:
    shares = even_shares(microbatches, {1: 0.5, 4: 2.0, 7: 1.0})
    ends = [0, *(stop for _, stop in shares.values())]
    assert [first for first, _ in shares.values()] == ends[:-1]
    assert ends[-1] == microbatches
    assert sum(first < stop for first, stop in shares.values()) == min(3, microbatches)


ALONE = {0: 0, 1: 1, 2: 2}
"""By rank, the first one of its pipeline."""


def test_a_step_that_all_have_the_sum_of_is_applied_and_another_is_made_again() -> None:
    held = {0: ((0, 2),), 2: ((4, 6),)}
    whole = {r: Promise(4, (1, 0), step=9, digests={0: DIGEST}, held=held[r], pace_s=1.0) for r in held}
    applied = next_generation(5, whole, 6, ALONE, {})
    assert (applied.number, applied.members, applied.step, applied.is_applied) == (5, (0, 2), 9, True)
    assert applied.held == {}
    assert applied.shares == {0: (0, 3), 2: (3, 6)}
    begun = whole | {2: Promise(4, (1, 0), step=9, held=((4, 6),), left=2, pace_s=1.0)}
    again = next_generation(5, begun, 6, ALONE, {})
    assert not again.is_applied
    assert again.held == {0: ((0, 2), (2, 4)), 2: ((4, 6),)}, "rank 2 is still busy with its own"
    late = Promise(4, (1, 0), step=8, digests={0: DIGEST}, held=((2, 6),), pace_s=1.0)
    behind = next_generation(5, begun | {2: late}, 6, ALONE, {})
    assert behind.held == {0: ((0, 2), (2, 4)), 2: ((4, 6),)}, "it has none of step 9"


def test_a_stage_that_is_behind_makes_what_its_pipeline_has_begun_with() -> None:
    """Ranks 0 and 1 are a pipeline, and so were 2 and 3."""
    pipelines = {0: 0, 1: 0, 2: 2, 3: 2}
    ahead = Promise(4, (1, 0), step=9, held=((0, 4),), left=4, pace_s=1.0)
    behind = Promise(4, (1, 0), step=8, digests={7: DIGEST}, held=((0, 4),), pace_s=3.0)
    generation = next_generation(5, {0: ahead, 1: behind}, 6, pipelines, {})
    assert (generation.members, generation.step, generation.is_applied) == ((0, 1), 9, False)
    assert generation.held == {0: ((0, 4), (4, 6))}
    assert generation.shares == {0: (0, 6)}


def test_who_joins_makes_nothing_of_the_step_under_way() -> None:
    at_work = {r: Promise(4, (1, 0), step=9, held=((3 * r, 3 * r + 3),), pace_s=1.0) for r in (0, 1)}
    generation = next_generation(5, at_work, 6, ALONE, {2: 2.0})
    assert (generation.members, generation.new, generation.holders) == ((0, 1, 2), (2,), (0, 1))
    assert generation.held == {0: ((0, 3),), 1: ((3, 6),)}
    assert generation.shares == {0: (0, 3), 1: (3, 5), 2: (5, 6)}
    assert generation.first_step == 9
    at_work[1] = Promise(5, (1, 0), step=9, is_new=True)
    assert next_generation(6, at_work, 6, ALONE, {}).new == (1,), "it has still no weights"


def test_shares_follow_a_rank_that_has_become_slow_once_two_steps_show_it() -> None:
    paces, shares = Paces(), {0: (0, 4), 1: (4, 8)}
    for _ in range(3):
        assert paces.deal_anew({0: 1.0, 1: 1.05}, shares, 8) is None, "nothing to gain"
    assert paces.deal_anew({0: 1.0, 1: 3.0}, shares, 8) is None, "that may be chance"
    assert paces.deal_anew({0: 1.0, 1: 3.0}, shares, 8) == {0: (0, 6), 1: (6, 8)}
    assert paces.deal_anew({0: 1.0, 1: None}, shares, 8) == {0: (0, 6), 1: (6, 8)}


def test_what_ends_older_connections_does_not_end_the_next_ones() -> None:
    happened: list[str] = []
    has_begun = threading.Event()

    class Group:
        def abort(self) -> None:
            has_begun.set()
            time.sleep(0.2)
            happened.append("aborted")

        def reconnect(self, uuid: int, peers: Sequence[int], timeout_s: float) -> None:
            happened.append("reconnects")

    connections = SumConnections(Group(), 0)
    ends = threading.Thread(target=connections.give_up, args=(0,))
    ends.start()
    assert has_begun.wait(30)
    connections.renew(1, [0, 1])
    ends.join()
    assert happened[-1] == "reconnects"
    assert "aborted" in happened


def test_shares_seldom_follow_what_is_chance() -> None:
    draw, paces, shares, dealt = random.Random(1), Paces(), even_shares(32, dict.fromkeys(range(4), 1.0)), 0
    for _ in range(200):
        told = {rank: draw.lognormvariate(0.0, 0.1) for rank in range(4)}
        if anew := paces.deal_anew(told, shares, 32):
            shares, dealt = anew, dealt + 1
    assert dealt <= 6, "by the median of three steps it were dozens"


@pytest.mark.parametrize(
    ("generation", "fault"),
    [
        (Generation(1, (), {}), "its members are"),
        (Generation(1, (2, 0), {0: (0, 1), 2: (1, 2)}), "its members are"),
        (Generation(1, (0, 9), {0: (0, 1), 9: (1, 2)}), "its members are"),
        (Generation(1, (0, 3), {0: (0, 1), 3: (1, 6)}), "not whole pipelines"),
        (Generation(1, (0, 2), {0: (0, 6)}), "not of its members"),
        (Generation(1, (0,), {0: (0, 7)}), "not of 6 microbatches"),
        (Generation(1, (0,), {0: (0, 6)}, held={0: ((4, 3),)}), "not of 6 microbatches"),
        (Generation(1, (0,), {0: (0, 6)}, held={0: ((0, 4),)}), "not of 6 microbatches"),
        (Generation(1, (0, 1), {0: (0, 4), 1: (3, 6)}), "not of 6 microbatches"),
        (Generation(1, (0,), {0: (0, 6)}, held={2: ((3, 4),)}), "not of its members"),
        (Generation(1, (0,), {0: (0, 6)}, new=(0,)), "no weights yet"),
        (Generation(1, (0,), {0: (0, 6)}, new=(1,)), "no weights yet"),
    ],
)
def test_a_generation_that_no_honest_rank_proposes_is_refused(generation: Generation, fault: str) -> None:
    pipelines = {0: 0, 1: 1, 2: 2, 3: 3, 4: 3}
    assert fault in str(generation.fault(pipelines, 6))
    whole = Generation(1, (0, 2), {0: (0, 6), 2: (6, 6)}, held={0: ((0, 2), (4, 6)), 2: ((2, 4),)})
    assert whole.fault(pipelines, 6) is None
    assert replace(whole, is_applied=True, held={}).fault(pipelines, 6) is None


def test_a_message_that_is_none_names_its_sender() -> None:
    peer = Peer(cast("Any", None), 3)
    for text in (b"", b"[]", b'{"kind": "vote"}', b'{"kind": "other"}', b'{"kind": "commit", "number": -1}'):
        with pytest.raises(PeerProtocolError, match="rank 3 sent what is no message"):
            read_message(peer, text)


@pytest.fixture
def groups() -> Iterator[list[Any]]:
    """Two ranks of this process, connected."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    made, connecting = [], []
    for rank in range(2):
        options = PairOptions({1 - rank: "127.0.0.1"}, {1 - rank: "theirs"})
        asked = SimpleNamespace(group_rank=rank, group_size=2, timeout=timedelta(seconds=20))
        made.append(make_group(asked, options))
        connecting.append(run_in_thread(partial(made[-1].connect, store, options)))
    wait_for_all(connecting, 20.0)
    yield made
    for group in made:
        group.close()


def lines(group: Any, peer: int, hear: Any = lambda *_: None, lost: Any = lambda _: None) -> MemberLines:
    return MemberLines({peer: Peer(group, peer)}, hear, lost, lambda: None)


def test_what_a_rank_says_last_arrives_though_it_leaves_at_once(groups: list[Any]) -> None:
    """The others may need it to agree on going on without that rank."""
    numbers: list[int] = []
    is_lost = threading.Event()

    def hear(_rank: int, message: MemberMessage | None, _data: bytes) -> None:
        if isinstance(message, Trouble):
            numbers.append(message.number)
            time.sleep(0.005)  # a machine that is busy

    leaves, stays = lines(groups[0], 1), lines(groups[1], 0, hear, lambda _: is_lost.set())
    leaves.start()
    stays.start()
    for number in range(40):
        leaves.send(1, Trouble(number, ()))
    leaves.close()
    groups[0].close()
    assert is_lost.wait(20.0)
    stays.close()
    assert numbers == list(range(40))


def test_a_line_on_which_nobody_listens_any_more_is_lost(
    groups: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cause makes no difference: else all would wait for that rank for ever."""
    is_lost, is_told = threading.Event(), threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda _: is_told.set())

    def fail(*_: Any) -> None:
        raise ValueError("a fault of ours")

    ends = [lines(groups[0], 1), lines(groups[1], 0, fail, lambda _: is_lost.set())]
    for end in ends:
        end.start()
    assert is_lost.wait(20.0)
    assert is_told.wait(20.0)  # else it may be told in the next test
    for end in ends:
        end.close()


def test_a_silence_is_unusual_once_the_usual_is_known() -> None:
    arrivals = Arrivals(0.0)
    for beat in range(1, 9):
        assert arrivals.limit_s(0.5) is None
        arrivals.note(beat * 0.1 + (0.01 if beat % 2 else 0.0))
    for _ in range(100):  # a burst of messages makes no silence unusual
        arrivals.note(0.8, is_message=True)
    limit_s = arrivals.limit_s(0.5)
    assert limit_s == pytest.approx(0.1 + 0.5 + 0.5, abs=0.02), "a beat, its least spread, and a step"
    assert arrivals.limit_s(None) is None, "how long a step takes is not known yet"
    heard_at = arrivals.heard_at
    arrivals.excuse(20.0)
    assert arrivals.heard_at == heard_at + 20.0
