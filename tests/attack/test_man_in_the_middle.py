"""Somebody on the path: what he does ends a run with the pair named, or changes nothing.

In the clear what passes after a proof is his to replace (docs/security.md says so), but what he passes on
unread reaches the right rank or none. Through TLS he can do nothing at all but delay and cut.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
from tests.attack import middle
from tests.attack.backends import GLOO, SKYCTL, Over, unpromised
from tests.attack.rank_forms import FORMS, orders

from skyctl.errors import RunError
from skyctl.remote.credentials import make_credentials
from skyctl.transport.peer_connection import FIRST_TAG, PeerConnection
from skyctl.transport.work import Work

from ..helpers.orders import with_fields

Workloads = Callable[..., dict[str, Any]]
Ends = tuple[PeerConnection, PeerConnection]
ALTERED: dict[str, middle.Alterations] = {
    "one bit changed": middle.flipping,
    "a piece dropped": middle.dropping,
    "what was said, once more": middle.replaying,
    "cut": middle.cutting,
}
altered = pytest.mark.parametrize("alter", ALTERED)
STALL_S = 30.0
"""Of ranks over Gloo that have trained before: what has stalled there never ends by itself."""
UNTOLD = unpromised("a rank that sends is not told of the cut; its peer is, and the launcher ends both")
UNCHECKED = unpromised("nothing checks what passes over Gloo")
both_ways = pytest.mark.parametrize("encrypt", [False, True], ids=["clear", "tls"])


class Neighbours:
    """The connections of four ranks: ``pairs[i]`` is where rank i listens and rank i + 1 connects."""

    def __init__(self, encrypt: bool) -> None:
        told = make_credentials(4, [(0, 1), (1, 2), (2, 3)], encrypt=encrypt)

        def end(rank: int, other: int) -> PeerConnection:
            return PeerConnection(
                f"rank {other}",
                10.0,
                secret=told[rank].secrets[other],
                identity=told[rank].tls,
                log=lambda _line: None,
            )

        self.pairs: list[Ends] = [(end(i, i + 1), end(i + 1, i)) for i in range(3)]

    def meet(self, listening: int, connecting: int, door: middle.Middle, limit_s: float = 4.0) -> list[Any]:
        """The errors of both ends when ``door`` leads one pair's connector to the listener of another."""
        listener, connector = self.pairs[listening][0], self.pairs[connecting][1]
        host, port = door.between("127.0.0.1", listener.listen("127.0.0.1"))
        with ThreadPoolExecutor(2) as pool:
            ends = [
                pool.submit(listener.accept, limit_s),
                pool.submit(connector.connect, host, port, "127.0.0.1", limit_s),
            ]
            return [end.exception() for end in ends]

    def close(self) -> None:
        for pair in self.pairs:
            for end in pair:
                end.close()


@pytest.fixture
def pipeline() -> Iterator[Callable[[bool], Neighbours]]:
    with ExitStack() as stack:

        def make(encrypt: bool) -> Neighbours:
            made = Neighbours(encrypt)
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture
def between() -> Iterator[Callable[..., Any]]:
    """Makes somebody in the middle, who is gone afterwards."""
    with ExitStack() as stack:

        def make(kind: type[middle.Middle] = middle.Middle, *how: Any) -> middle.Middle:
            made = kind(*how)
            stack.callback(made.close)
            return made

        yield make


@both_ways
def test_unread_connections_can_t_reorder_the_pipeline(
    pipeline: Callable[[bool], Neighbours], between: Callable[..., Any], encrypt: bool
) -> None:
    """0→2→1→3: the listener of rank 0 is given to rank 2, and so on."""
    made = pipeline(encrypt)
    for listening, connecting in ((0, 1), (1, 2), (2, 0)):
        found = made.meet(listening, connecting, between(), limit_s=0.5)
        assert all(isinstance(error, RunError) for error in found), found
        assert "another program, or another run's rank" in str(found[1].hint)


def test_through_tls_two_pairs_can_t_be_crossed_after_their_proofs(
    pipeline: Callable[[bool], Neighbours], between: Callable[..., Any]
) -> None:
    """One certificate serves every rank; the key of the proof serves this pair alone."""
    made, crossing = pipeline(True), between(middle.Crossing)
    with ThreadPoolExecutor(2) as pool:
        met = [pool.submit(made.meet, i, i, crossing) for i in (0, 2)]
        found = [error for one in met for error in one.result()]
    assert all(isinstance(error, RunError) for error in found), found
    assert "proved itself before" in " ".join(str(error) for error in found)


@both_ways
@pytest.mark.parametrize("after", [3, 71, 103])
def test_a_handshake_that_is_cut_is_tried_again(
    pipeline: Callable[[bool], Neighbours], between: Callable[..., Any], encrypt: bool, after: int
) -> None:
    """Within the hello and within the proof: once cut, it is whole the next time."""
    made, times = pipeline(encrypt), []

    def cut_once(towards: bool, before: int, data: bytes) -> bytes:
        if towards and before + len(data) > after and not times:
            times.append(time.monotonic())
            raise middle.Cut(data[: after - before])
        return data

    assert made.meet(1, 1, between(middle.Middle, cut_once), limit_s=10.0) == [None, None]
    assert len(times) == 1


def test_a_hello_heard_on_the_wire_opens_nothing(
    pipeline: Callable[[bool], Neighbours], between: Callable[..., Any]
) -> None:
    made = pipeline(False)

    def twice(towards: bool, before: int, data: bytes) -> bytes:
        return data + data if towards and not before else data

    found = made.meet(1, 1, between(middle.Middle, twice), limit_s=0.5)
    assert all(isinstance(error, RunError) for error in found), found


@altered
def test_through_tls_nothing_is_changed_unnoticed(
    pipeline: Callable[[bool], Neighbours], between: Callable[..., Any], alter: str
) -> None:
    """The data arrive as they were sent, up to where the connection ends with the peer named."""
    made = pipeline(True)
    assert made.meet(1, 1, between(middle.Middle, ALTERED[alter](6000))) == [None, None]
    listener, connector = made.pairs[1]
    # short ones, of which some are whole before what is altered, and long ones: more than one piece
    sent = [torch.full((500 if number < 10 else 8000,), float(number)) for number in range(20)]
    heard = [torch.zeros_like(tensor) for tensor in sent]
    receives = [listener.recv(tensor, FIRST_TAG) for tensor in heard]
    waits = [connector.recv(torch.zeros(1), FIRST_TAG)]  # which nobody sends
    with suppress(RunError):  # the other end may have noticed before the last: it is gone, or sends an alert
        for tensor in sent:
            waits.append(connector.send(tensor, FIRST_TAG))
    whole = 0
    while (error := _error_of(receives[whole])) is None:
        assert torch.equal(heard[whole], sent[whole])
        whole += 1
    assert 0 < whole < len(sent)
    assert "rank 2" in str(error)
    assert "rank 1" in str(_error_of(*waits))


def _error_of(*transfers: Work) -> RunError | None:
    """The error of the first transfer that fails; None: none does."""
    try:
        for transfer in transfers:
            transfer.wait(timedelta(seconds=10))
    except RunError as error:
        return error
    return None


def through(door: middle.Middle, over: Over) -> Callable[[int, str, int], tuple[str, int]]:
    """All of a run's connections go over it."""
    return lambda _rank, host, port: door.between(host, port, next_to=over.backend == GLOO)


def run(ranks: Any, over: Over, told: list[dict[str, Any]], *how: Any) -> Any:
    """The outcome of ranks over that backend; if no rank gets any further, they have stalled."""
    over.happened = "stalled"
    ended = ranks.run([with_fields(one, backend=over.backend) for one in told], *how)
    kinds = {error["event"] for error in ended.errors.values()}
    over.happened = "process ended" if "exit" in kinds else "ended" if kinds else "unnoticed"
    return ended


def all_name_peers(ended: Any, *types: str) -> None:
    assert set(ended.errors) == {0, 1, 2, 3}
    for rank, error in ended.errors.items():
        assert error["type"] in ("PeerLostError", *types), (rank, error)
        assert "rank " in error["message"], (rank, error)


@pytest.mark.attack
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("over", "encrypt"),
    [(SKYCTL, False), (SKYCTL, True), pytest.param(GLOO, False, marks=UNTOLD)],
    indirect=["over"],
    ids=["clear", "tls", "gloo"],
)
def test_a_run_through_somebody_who_delays_and_then_through_one_who_cuts(
    request: pytest.FixtureRequest,
    ranks: Any,
    workload: Workloads,
    between: Callable[..., Any],
    form: str,
    over: Over,
    encrypt: bool,
) -> None:
    over.attempt = "in the middle: delayed, then cut"
    if over.backend == GLOO:  # they may be of no use afterwards
        ranks = request.getfixturevalue("fresh_ranks")
    door = between(middle.Middle, middle.delaying(1, 0.004))
    calm = ranks.run(orders(form, workload(batch_size=8), 3, encrypt=False))
    assert not calm.errors, calm.errors
    ranks.stall_s = STALL_S if over.backend == GLOO else ranks.stall_s
    way, told = through(door, over), orders(form, workload(batch_size=8), 3, encrypt=encrypt)
    late = run(ranks, over, told, lambda *_: None, way)
    assert not late.errors, late.errors
    assert len(late.losses) == 3
    if form != "staleness":  # where the order of arrival counts
        assert late.losses == calm.losses

    def cut(_pool: Any, _rank: int, event: dict[str, Any]) -> None:
        if event["event"] == "step":
            door.close()

    all_name_peers(run(ranks, over, orders(form, workload(batch_size=8), 1000, encrypt=encrypt), cut, way))


@pytest.mark.attack
@pytest.mark.parametrize(
    ("over", "form"),
    [
        *((SKYCTL, form) for form in FORMS),
        *(pytest.param(GLOO, form, marks=UNCHECKED) for form in ("pipeline", "data", "hybrid")),
    ],
    indirect=["over"],
)
@altered
def test_a_run_through_tls_ends_where_it_is_altered(
    request: pytest.FixtureRequest,
    ranks: Any,
    workload: Workloads,
    between: Callable[..., Any],
    over: Over,
    form: str,
    alter: str,
) -> None:
    """The steps trained before are as they would have been. Over Gloo there is no TLS."""
    over.attempt = f"in the middle, skyctl under TLS: {alter}"
    if over.backend == GLOO:  # they may be of no use afterwards
        ranks = request.getfixturevalue("fresh_ranks")
    calm = ranks.run(orders(form, workload(batch_size=8), 100, encrypt=False))
    ranks.stall_s = STALL_S if over.backend == GLOO else ranks.stall_s
    door = between(middle.Middle, ALTERED[alter](20_000))
    encrypt, steps = (True, 1000) if over.backend == SKYCTL else (False, 200)
    told = orders(form, workload(batch_size=8), steps, encrypt=encrypt)
    ended = run(ranks, over, told, lambda *_: None, through(door, over))
    all_name_peers(ended, "RunError")  # of those who have seen it, and not only lost a peer
    done = min(len(steps) for steps in ended.steps.values())
    assert 0 < done < 100
    if form != "staleness":
        for rank, steps in ended.steps.items():
            for step, expected in zip(steps, calm.steps[rank], strict=False):
                assert step["loss"] == expected["loss"]
