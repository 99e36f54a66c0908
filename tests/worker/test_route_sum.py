"""Sums over routes between ranks over real sockets: every layout, the same bits, and peers that lie."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.helpers.rounding import rounding
from tests.worker.sums import RouteEdges, connected, places, ring, star, together

from skyctl.transport.transfer_errors import PeerLostError, PeerProtocolError
from skyctl.worker.peer import FIRST_SUM_TAG
from skyctl.worker.sums import sum_messages
from skyctl.worker.sums.route_sum import RouteSum
from skyctl.worker.sums.sum_layout import make_layout
from skyctl.worker.sums.sum_messages import AGREEMENT, FIGURES, GRADIENTS, UP, SumMessage, SumStamp
from skyctl.worker.sums.sum_work import SumWork

TREE: list[RouteEdges] = [
    (0.3, 1, [(0, 3), (2, 3), (3, 1)], [(1, 3), (3, 0), (3, 2)]),
    (0.7, 2, [(0, 1), (1, 2)], [(2, 0), (2, 1)]),
]
"""Ranks 0 to 2 hold numbers; 3 helps on the first route, and is not on the second."""
LAYERS = [[7, 1], [], [300], [5, 64, 1]]


CLOSE = {"float32": rounding(4), "bfloat16": 0.03, "int8": 0.1, "fixed32": 0}


def sums(routes: list[RouteEdges], replicas: int, count: int, chunk: int, name: str, steps: int = 2) -> Any:
    """By rank, each step's flat tensors after the sum, and what was agreed."""
    layout = make_layout(LAYERS, [route[0] for route in routes], chunk)
    generator = torch.Generator().manual_seed(0)
    given = [
        [[torch.randn(n, generator=generator) for n in layer] for layer in LAYERS] for _ in range(replicas)
    ]
    if name == "fixed32":
        given = [[[(t * 1e6).int() for t in layer] for layer in rank_layers] for rank_layers in given]
    with connected(routes, count) as ends:

        def act(rank: int) -> Any:
            peers = ends[rank]
            part = RouteSum(0, places(routes, rank), peers)
            summed = []
            for step in range(steps):
                helps = rank >= replicas
                sum_work = SumWork(layout, step, kind=GRADIENTS, format=name, helps=helps)
                part.begin(sum_work, 3)
                mine = [[t.clone() for t in layer] for layer in given[rank]] if not helps else []
                at = 0
                for last in layout.last_layer_of if mine else ():
                    sum_work.add_bucket([t for layer in mine[at : last + 1] for t in layer])
                    at = last + 1
                agreed = part.agree(bytes([0, rank == 1, 0]))
                sum_work.wait()
                assert sum_work.ready_buckets == 0, "it holds the gradients no longer"
                summed.append(([t for layer in mine for t in layer], agreed))
            part.close()
            return summed

        return given, together(count, act)


@pytest.mark.parametrize(
    ("routes", "replicas", "count"),
    [
        (ring(2), 2, 2),
        (ring(4), 4, 4),
        (star(1), 1, 1),
        (star(3, root=2), 3, 3),
        (TREE, 3, 4),
    ],
    ids=["ring of 2", "ring of 4", "alone", "star", "trees with a helper"],
)
@pytest.mark.parametrize("chunk", [1, 100, 10_000])
@pytest.mark.parametrize("name", CLOSE)
def test_every_replica_ends_with_the_same_sum(
    routes: list[RouteEdges], replicas: int, count: int, chunk: int, name: str
) -> None:
    if chunk == 1 and count > 2:
        chunk = 13  # hundreds of messages are enough
    given, by_rank = sums(routes, replicas, count, chunk, name)
    expected = [
        sum(t)
        for t in zip(*([x for layer in rank_layers for x in layer] for rank_layers in given), strict=True)
    ]
    for rank_sums in by_rank:
        assert not isinstance(rank_sums, Exception), rank_sums
        for tensors, agreed in rank_sums:
            assert agreed == bytes([0, replicas > 1, 0])
            for tensor, wanted, first in zip(tensors, expected, by_rank[0][0][0], strict=bool(tensors)):
                assert torch.equal(tensor, first), "the same bytes on every replica and in every step"
                torch.testing.assert_close(tensor, wanted, rtol=CLOSE[name], atol=CLOSE[name])


@pytest.mark.parametrize(("routes", "replicas", "count"), [(ring(4), 4, 4), (TREE, 3, 4)])
def test_who_sends_on_what_it_receives_always_has_room_to_receive(
    routes: list[RouteEdges], replicas: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where buckets end with a few numbers: many short messages fit into what is under way."""
    monkeypatch.setattr(sum_messages, "AHEAD_BYTES", 3 * 4 * 20)
    given, by_rank = sums(routes, replicas, count, 20, "float32")
    expected = [
        sum(t)
        for t in zip(*([x for layer in rank_layers for x in layer] for rank_layers in given), strict=True)
    ]
    for rank_sums in by_rank:
        assert not isinstance(rank_sums, Exception), rank_sums
        for tensors, _ in rank_sums:
            for tensor, wanted in zip(tensors, expected, strict=bool(tensors)):
                torch.testing.assert_close(tensor, wanted, rtol=rounding(4), atol=rounding(4))


def test_the_layout_gives_every_element_to_one_chunk() -> None:
    for chunk in (1, 3, 64, 1000):
        for shares in ([1.0], [0.5, 0.5], [0.1, 0.0001, 0.8999]):
            layout = make_layout(LAYERS, shares, chunk)
            assert layout.last_layer_of[-1] == len(LAYERS) - 1
            seen = [
                (piece.bucket, place)
                for route in layout.routes
                for piece in route
                for part in piece.pieces
                for place in ((part.tensor, e) for e in range(part.start, part.stop))
            ]
            assert len(seen) == len(set(seen)) == sum(map(sum, LAYERS))
            assert all(0 < piece.numel <= chunk for route in layout.routes for piece in route)


def test_small_layers_share_a_bucket() -> None:
    assert make_layout([[10]] * 6, [0.5, 0.5], 15).last_layer_of == (2, 5)
    assert make_layout([[40], [40], []], [1.0], 15).last_layer_of == (0, 1, 2)


def lying(message: SumMessage, tag: int = FIRST_SUM_TAG + 2, name: str = "float32") -> Any:
    """The error that rank 0, the root of a star, raises at one message of rank 1."""
    routes = star(2)
    layout = make_layout([[4]], [1.0], 4)
    with connected(routes, 2) as ends:
        peers = {1: ends[0][1]}
        part = RouteSum(0, places(routes, 0), peers)
        sum_work = SumWork(layout, 5, kind=GRADIENTS, format=name)
        part.begin(sum_work, 2)
        sum_work.add_bucket([torch.zeros(4)])
        ends[1][0].send(message.tensor, tag)

        def wait(_: int) -> None:
            part.agree(b"\0\0")
            sum_work.wait()

        [error] = together(1, wait)
        part.close()
        assert isinstance(error, PeerProtocolError), error
        assert error.peer_rank == 1
        return str(error)


@pytest.mark.parametrize(
    ("stamp", "message_text"),
    [
        (SumStamp(GRADIENTS, 4, 0, 0, UP, 0, 16), "gradients of step 4, group 0, route 0 up, chunk 0"),
        (SumStamp(GRADIENTS, 5, 1, 0, UP, 0, 16), "gradients of step 5, group 1, route 0 up, chunk 0"),
        (SumStamp(GRADIENTS, 5, 0, 3, UP, 0, 16), "gradients of step 5, group 0, route 3 up, chunk 0"),
        (SumStamp(FIGURES, 5, 0, 0, UP, 7, 16), "running figures of step 5, group 0, route 0 up, chunk 7"),
        (SumStamp(99, 5, 0, 0, -1, 0, 16), r"unknown (99) of step 5, group 0, route 0 unknown (-1), chunk 0"),
    ],
)
def test_a_mix_up_names_what_came_and_what_was_expected(stamp: SumStamp, message_text: str) -> None:
    message = SumMessage(16)
    message.stamp(stamp)
    text = lying(message)
    assert f"rank 1 sent {message_text} (16 bytes)" in text
    assert "expected were gradients of step 5, group 0, route 0 up, chunk 0 (16 bytes)" in text


def test_a_message_of_another_size_or_an_odd_agreement_is_refused() -> None:
    assert "sent 72 bytes where 80 are expected" in lying(SumMessage(8))
    odd = SumMessage(3)
    odd.stamp(SumStamp(AGREEMENT, 5, 0, 0, UP, 0, 3))
    odd.fill(b"\1\7\0")
    assert "bytes above 1" in lying(odd, FIRST_SUM_TAG)


@pytest.mark.parametrize("scale", [math.nan, math.inf, -1.0])
def test_a_scale_that_no_honest_peer_sends_is_refused(scale: float) -> None:
    message = SumMessage(8)
    message.stamp(SumStamp(GRADIENTS, 5, 0, 0, UP, 0, 8))
    message.payload[:4].view(torch.float32).fill_(scale)
    error = lying(message, name="int8")
    assert f"route 0 up, chunk 0 (8 bytes) with a scale of {scale:g}" in error


def test_a_peer_that_closes_ends_the_sum_for_all() -> None:
    routes = ring(3)
    layout = make_layout([[1000]], [route[0] for route in routes], 10)
    with connected(routes, 3) as ends:

        def act(rank: int) -> Any:
            peers = ends[rank]
            part = RouteSum(0, places(routes, rank), peers)
            sum_work = SumWork(layout, 0, kind=GRADIENTS)
            part.begin(sum_work, 1)
            try:
                if rank == 1:
                    for connection in peers.values():
                        connection.close()
                    return None
                sum_work.add_bucket([torch.ones(1000)])
                part.agree(b"\0")
                sum_work.wait()
            finally:
                part.close()
            return None

        outcomes = together(3, act)
        assert isinstance(outcomes[0], PeerLostError), outcomes
        assert isinstance(outcomes[2], PeerLostError), outcomes


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 3e38])
@pytest.mark.parametrize("format", ["float32", "bfloat16", "int8"])
def test_a_sum_of_numbers_that_are_not_tame_is_nobodys_lie(number: float, format: str) -> None:  # noqa: A002
    """As where training diverges: they are summed as they are, and an overflow is no lie either."""
    layout = make_layout(LAYERS, [route[0] for route in TREE], 100)
    with connected(TREE, 4) as ends:

        def act(rank: int) -> Any:
            part = RouteSum(0, places(TREE, rank), ends[rank])
            sum_work = SumWork(layout, 0, kind=GRADIENTS, format=format)
            part.begin(sum_work, 1)
            own, at = [torch.full((n,), number) for layer in LAYERS for n in layer], 0
            for last in layout.last_layer_of:
                count = sum(len(layer) for layer in LAYERS[at : last + 1])
                bucket, own_rest = own[:count], own[count:]
                sum_work.add_bucket(bucket)
                own, at = own_rest, last + 1
            part.agree(b"\0")
            sum_work.wait()
            part.close()
            return bool(bucket[0].isfinite().any())

        assert together(4, act) == [False] * 4


@pytest.mark.parametrize(
    ("teller", "told_by"),
    [(0, [None, 3, 3, 0]), (1, [3, None, 3, 1]), (3, [3, 3, 3, None]), (None, [None] * 4)],
)
def test_each_rank_knows_who_told_it_that_the_run_ends(teller: int | None, told_by: list[int | None]) -> None:
    """So the launcher finds who began, be it one that only helps, where nobody had asked for that."""
    layout = make_layout(LAYERS, [route[0] for route in TREE], 100)
    with connected(TREE, 4) as ends:

        def act(rank: int) -> Any:
            peers = ends[rank]
            part = RouteSum(0, places(TREE, rank), peers)
            for step in range(3):
                sum_work = SumWork(layout, step, kind=GRADIENTS, helps=True)
                part.begin(sum_work, 2)
                ends_here = step >= 1 and rank == teller
                assert part.agree(bytes([ends_here, 0]))[0] == (step >= 1 and teller is not None)
                sum_work.wait()
            part.close()
            return part.ended_by

        assert together(4, act) == told_by
