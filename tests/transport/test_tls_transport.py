"""One end of a TLS connection whose other end is the test: it says when which bytes of which record come."""

from __future__ import annotations

import itertools
import random
import select
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
import torch

from skyctl.remote import credentials
from skyctl.remote.credentials import make_tls_certificate
from skyctl.transport import tls_transport
from skyctl.transport.message_transport import _PAYLOAD, FRAME, Transfer
from skyctl.transport.tls_identity import TlsIdentity
from skyctl.transport.tls_transport import TlsTransport
from skyctl.transport.transfer_errors import TransferClosedError

LIMIT = timedelta(seconds=30)
RECORD = 1 << 14
WAKE = 1 << 15
HEADER = 5
PACKET = 1448
TAG = 7
MOST_CUTS = 12


class Peer:
    """The other end: its records are made here, and sent when the test wants."""

    def __init__(self, identity: TlsIdentity) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            theirs = socket.create_connection(listener.getsockname())
            self.sock, _ = listener.accept()
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received, self._sent = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = identity._context(server=True).wrap_bio(self._received, self._sent, server_side=True)
        client = identity._context(server=False).wrap_socket(theirs, do_handshake_on_connect=False)
        answering = threading.Thread(target=client.do_handshake)
        answering.start()
        self._shake_hands()
        answering.join()
        self.end = TlsTransport(client, "the test")

    def _shake_hands(self) -> None:
        while True:
            try:
                self.tls.do_handshake()
                return
            except ssl.SSLWantReadError:
                self.sock.sendall(self._sent.read())
                self._received.write(self.sock.recv(1 << 16))

    def records(self, payload: bytes, record_bytes: int = RECORD) -> Iterator[bytes]:
        """A message's frame and payload, in records that carry so much each."""
        message = FRAME.pack(_PAYLOAD, TAG, len(payload)) + payload
        for at in range(0, len(message), record_bytes):
            self.tls.write(message[at : at + record_bytes])
            yield self._sent.read()

    def alert(self) -> bytes:
        """The record that ends TLS."""
        with pytest.raises(ssl.SSLWantReadError):
            self.tls.unwrap()
        return self._sent.read()

    def expect(self, count: int) -> tuple[torch.Tensor, Transfer]:
        """A receive of so many bytes, posted."""
        into = torch.zeros(count, dtype=torch.uint8)
        return into, self.end.recv(into, TAG)

    def let_it_wait(self) -> None:
        """Until the end has read what it wants to read, as far as one can tell from here."""
        time.sleep(0.002)
        while not self.end._is_waiting and self.end._error is None:
            time.sleep(0.001)


@pytest.fixture
def wakes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one number for each time that the end's thread is woken."""
    woken: list[int] = []

    class CountedPoll:
        def __init__(self) -> None:
            self._poll = select.poll()
            self.register, self.modify = self._poll.register, self._poll.modify

        def poll(self) -> None:
            self._poll.poll()
            woken.append(1)

    class Select:
        poll = CountedPoll

    monkeypatch.setattr(tls_transport, "select", Select)
    return woken


@pytest.fixture
def peer(wakes: list[int]) -> Iterator[Peer]:
    identity = make_tls_certificate()
    assert identity is not None
    peer = Peer(identity)
    try:
        yield peer
    finally:
        peer.end.close()
        peer.sock.close()


def test_many_packets_of_a_payload_wake_the_thread_once(peer: Peer, wakes: list[int]) -> None:
    payload = random.Random(0).randbytes(1 << 20)
    into, work = peer.expect(len(payload))
    stream = b"".join(peer.records(payload))
    for at in range(0, len(stream), PACKET):
        peer.sock.sendall(stream[at : at + PACKET])
        time.sleep(0.0003)
    work.wait(LIMIT)
    assert bytes(into.tolist()) == payload
    woken_by_each = len(stream) // PACKET
    assert len(stream) // WAKE + RECORD // PACKET < woken_by_each // 10  # but for what a busy machine adds
    assert len(wakes) < woken_by_each // 4


@pytest.mark.parametrize("record_bytes", [RECORD, 1000])
@pytest.mark.parametrize(
    "count",
    [1, RECORD - FRAME.size, RECORD, RECORD + 1, WAKE, WAKE + RECORD - 1, WAKE + RECORD + 1, 3 * WAKE],
)
def test_the_end_of_a_payload_comes_without_another_message_behind_it(
    peer: Peer, count: int, record_bytes: int
) -> None:
    payload = random.Random(count).randbytes(count)
    cut, cuts = 0, [0]
    while cuts:
        into, work = peer.expect(count)
        records = list(peer.records(payload, record_bytes))
        stream = b"".join(records)
        peer.sock.sendall(stream[:cut])
        peer.let_it_wait()
        peer.sock.sendall(stream[cut:])
        work.wait(LIMIT)
        assert bytes(into.tolist()) == payload
        cuts = _cuts(records) if cuts == [0] else cuts
        cut = cuts.pop()


def _cuts(records: list[bytes]) -> list[int]:
    """The places at which to stop for a while: at the ends of records, beside them, and within headers."""
    ends = list(itertools.accumulate(len(record) for record in records))
    around = {end + by for end in [0, *ends] for by in (-WAKE, -RECORD, -1, 0, 1, HEADER, HEADER + 1)}
    cuts = sorted(cut for cut in around if 0 < cut < ends[-1])
    return random.Random(1).sample(cuts, min(MOST_CUTS, len(cuts)))


@pytest.mark.parametrize("says_so", [True, False])
def test_a_peer_that_closes_within_a_payload_is_noticed(peer: Peer, says_so: bool) -> None:
    _, work = peer.expect(1 << 20)
    for record in itertools.islice(peer.records(bytes(1 << 20)), 20):
        peer.sock.sendall(record)
    peer.let_it_wait()
    if says_so:
        peer.sock.sendall(peer.alert())
    peer.sock.close()
    with pytest.raises(TransferClosedError):
        work.wait(LIMIT)


@pytest.mark.parametrize("year", [1950, 2200])
def test_a_certificates_dates_do_not_count(year: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node's clock may be off by decades: by it the run's certificate is of another age."""
    dates = iter((datetime(year, 1, 1, tzinfo=UTC), datetime(year + 1, 1, 1, tzinfo=UTC)))
    monkeypatch.setattr(credentials, "datetime", lambda *_, **__: next(dates))
    peer = Peer(make_tls_certificate())
    try:
        into, work = peer.expect(3)
        for record in peer.records(b"abc"):
            peer.sock.sendall(record)
        work.wait(LIMIT)
        assert bytes(into.tolist()) == b"abc"
    finally:
        peer.end.close()
        peer.sock.close()
