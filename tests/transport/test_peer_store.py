"""The exchange between two ends, what it tells Gloo, and the proof over Gloo's own connection."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from skyctl.transport import peer_connection
from skyctl.transport.peer_store import PeerStore

LIMIT = timedelta(seconds=20)


@pytest.fixture
def ends() -> Iterator[tuple[PeerStore, PeerStore]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield PeerStore(ours, 20.0), PeerStore(theirs, 20.0)


def both(*actions: Callable[[], Any]) -> list[Any]:
    """Two ends at a time; an exception in place of a result."""

    def run(action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Exception as exc:
            return exc

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, actions))


def test_what_one_end_sets_the_other_gets(ends: tuple[PeerStore, PeerStore]) -> None:
    ours, theirs = ends
    assert not ours.check(["a"])
    theirs.set("a", b"\0\1")
    theirs.set("b", "text")
    assert ours.get("b") == b"text"
    assert ours.check(["a", "b"])
    assert ours.get("a") == b"\0\1"
    assert theirs.get("a") == b"\0\1"  # its own


def test_waiting_ends_when_it_comes_or_in_time(ends: tuple[PeerStore, PeerStore]) -> None:
    ours, theirs = ends
    later = threading.Timer(0.1, lambda: theirs.set("late", b"x"))
    later.start()
    ours.wait(["late"], LIMIT)
    later.join()
    with pytest.raises(TimeoutError, match="waiting for never"):
        ours.wait(["late", "never"], timedelta(seconds=0.05))


def test_an_end_that_is_gone_is_an_error_but_not_for_a_look() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        theirs.close()
        exchange = PeerStore(ours, 20.0)
        assert not exchange.check(["a"])
        with pytest.raises(ConnectionResetError, match="closed by peer"):
            exchange.get("a")


def test_lengths_that_can_t_be_are_refused() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"\x7f\xff\xff\xff" * 2)
        with pytest.raises(ConnectionError, match="does not speak"):
            PeerStore(ours, 20.0).get("a")


def gloo(exchange: PeerStore, rank: int) -> Any:
    c10d: Any = dist
    options = c10d.ProcessGroupGloo._Options()
    options._timeout = LIMIT
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return c10d.ProcessGroupGloo(c10d.PrefixStore("gloo", exchange), rank, 2, options)


@pytest.mark.parametrize("right", [True, False])
def test_gloo_connects_and_an_unauthenticated_peer_is_found_out(
    ends: tuple[PeerStore, PeerStore], right: bool
) -> None:
    """Whoever got Gloo's connection must hold the key that the two have agreed on."""
    groups = both(lambda: gloo(ends[0], 0), lambda: gloo(ends[1], 1))
    keys = [b"k" * 32, b"k" * 32 if right else b"another"]
    found = both(
        *(lambda r=rank: peer_connection._authenticate_gloo(groups[r], r, keys[r], LIMIT) for rank in (0, 1))
    )
    if right:
        assert found == [None, None]
    else:
        assert all(isinstance(exc, RuntimeError) and "unauthenticated peer" in str(exc) for exc in found)
