"""The values that one end sets reach the other, over the connection that the two have."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch

from skyctl.transport.peer_store import ENTRY_BYTES, PeerStore
from skyctl.transport.socket_transport import SocketTransport

LIMIT = timedelta(seconds=20)
TAG = 4
Ends = tuple[SocketTransport, SocketTransport]


@pytest.fixture
def ends() -> Iterator[Ends]:
    ours, theirs = (SocketTransport(sock, "the other") for sock in socket.socketpair())
    try:
        yield ours, theirs
    finally:
        ours.close()
        theirs.close()


@pytest.fixture
def stores(ends: Ends) -> tuple[PeerStore, PeerStore]:
    return PeerStore(ends[0], TAG, 20.0), PeerStore(ends[1], TAG, 20.0)


def test_what_one_end_sets_the_other_gets(stores: tuple[PeerStore, PeerStore]) -> None:
    ours, theirs = stores
    assert not ours.check(["a"])
    theirs.set("a", b"\0\1")
    theirs.set("b", "text")
    assert ours.get("b") == b"text"
    assert ours.check(["a", "b"])
    assert ours.get("a") == b"\0\1"
    assert theirs.get("a") == b"\0\1"  # its own
    with pytest.raises(ValueError, match=f"{ENTRY_BYTES} are the most"):
        ours.set("much", bytes(ENTRY_BYTES))


def test_waiting_ends_when_it_comes_or_in_time(stores: tuple[PeerStore, PeerStore]) -> None:
    ours, theirs = stores
    later = threading.Timer(0.1, lambda: theirs.set("late", b"x"))
    later.start()
    ours.wait(["late"], LIMIT)
    later.join()
    with pytest.raises(TimeoutError, match="waiting for never"):
        ours.wait(["late", "never"], timedelta(seconds=0.05))
    theirs.set("after", b"y")  # the connection is as it was
    assert ours.get("after") == b"y"


def test_an_end_that_is_gone_is_an_error_but_not_for_a_look(ends: Ends) -> None:
    store = PeerStore(ends[0], TAG, 20.0)
    ends[1].close()
    assert not store.check(["a"])
    with pytest.raises(RuntimeError, match="closed"):
        store.get("a")


def test_lengths_that_can_t_be_are_refused(ends: Ends) -> None:
    entry = torch.full((ENTRY_BYTES,), 0x7F, dtype=torch.uint8)
    ends[1].send(entry, TAG)
    with pytest.raises(RuntimeError, match="does not speak"):
        PeerStore(ends[0], TAG, 20.0).get("a")
