"""The way through host memory, with streams that run only when somebody waits for them."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import timedelta

import pytest
import torch

from skyctl.remote.credentials import make_tls_certificate
from skyctl.transport.host_staging import BlockingCopyStreams, HostStaging, StreamEvent
from skyctl.transport.peer_connection import FIRST_TAG, PeerConnection
from skyctl.transport.tls_identity import TlsIdentity
from skyctl.transport.transfer_errors import PeerLostError, TransferClosedError

from ..helpers.processes import PATIENCE_S

LIMIT = timedelta(seconds=20)


class Stream:
    """Operations in order, each run when an event behind it is waited for: as late as can be."""

    def __init__(self) -> None:
        self._running = threading.RLock()
        self._queued: list[Callable[[], object]] = []
        self.done = 0

    def queue(self, operation: Callable[[], object]) -> Mark:
        self._queued.append(operation)
        return self.mark()

    def mark(self) -> Mark:
        return Mark(self, len(self._queued))

    def run(self, to: int) -> None:
        with self._running:
            while self.done < to:
                self.done += 1
                self._queued[self.done - 1]()


class Mark:
    """The place in a stream up to which it must have run."""

    def __init__(self, stream: Stream, place: int) -> None:
        self._stream, self._place = stream, place

    def query(self) -> bool:
        return self._stream.done >= self._place

    def synchronize(self) -> None:
        self._stream.run(self._place)


class Lazy:
    """A device whose streams are lazy; its tensors are this process's floats. ``order``: what was copied."""

    def __init__(self) -> None:
        self.computing, self._out, self._in = Stream(), Stream(), Stream()
        self.order: list[str] = []

    def host(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def mark(self) -> StreamEvent:
        return self.computing.mark()

    def copy_out(self, tensor: torch.Tensor, host: torch.Tensor, after: StreamEvent) -> StreamEvent:
        return self._copy(self._out, "out", tensor, host, after)

    def copy_in(self, host: torch.Tensor, tensor: torch.Tensor, after: StreamEvent) -> StreamEvent:
        return self._copy(self._in, "in", host, tensor, after)

    def consume(self, event: StreamEvent) -> None:
        self.computing.queue(event.synchronize)

    def _copy(
        self, stream: Stream, name: str, source: torch.Tensor, target: torch.Tensor, after: StreamEvent
    ) -> StreamEvent:
        def copy() -> None:
            after.synchronize()
            self.order.append(name)
            target.copy_(source)

        return stream.queue(copy)


class Wire:
    """A transport: a receive gets the oldest message of its tag when it is waited for."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, torch.Tensor]] = []
        self.there = threading.Condition()

    def send(self, tensor: torch.Tensor, tag: int) -> Sent:
        with self.there:
            self.sent.append((tag, tensor.clone()))
            self.there.notify_all()
        return Sent()

    def recv(self, tensor: torch.Tensor, tag: int) -> Received:
        return Received(self, tensor, tag)


class Sent:
    def wait(self, limit: timedelta) -> None:
        pass


class Received:
    def __init__(self, wire: Wire, tensor: torch.Tensor, tag: int) -> None:
        self._wire, self._tensor, self._tag = wire, tensor, tag

    def wait(self, limit: timedelta) -> None:
        with self._wire.there:
            assert self._wire.there.wait_for(
                lambda: any(tag == self._tag for tag, _ in self._wire.sent), limit.total_seconds()
            )
            at = next(i for i, (tag, _) in enumerate(self._wire.sent) if tag == self._tag)
            self._tensor.copy_(self._wire.sent.pop(at)[1])


@pytest.fixture
def parts() -> Iterator[tuple[HostStaging, Lazy, Wire]]:
    device, wire = Lazy(), Wire()
    staging = HostStaging(device, wire.send, wire.recv, "rank 1", lambda tensor: tensor.is_floating_point())
    yield staging, device, wire
    staging.close()
    assert not [t for t in threading.enumerate() if t.name == "sends to rank 1"]


def test_a_send_takes_what_was_computed_before_it_and_holds_nothing_up(
    parts: tuple[HostStaging, Lazy, Wire],
) -> None:
    staging, device, wire = parts
    tensor = torch.zeros(2, 3)
    begun = threading.Event()

    def compute() -> None:
        assert begun.wait(20)  # the send has returned: it did not wait for this
        tensor.fill_(7)

    device.computing.queue(compute)
    work = staging.send(tensor, 5)
    begun.set()
    work.wait(LIMIT)
    assert torch.equal(wire.sent[0][1], torch.full((2, 3), 7.0))


def test_sends_of_host_and_device_keep_their_order(parts: tuple[HostStaging, Lazy, Wire]) -> None:
    staging, device, wire = parts
    go = threading.Event()
    device.computing.queue(lambda: go.wait(20))
    works = []
    for number in range(4):
        works.append(staging.send(torch.tensor([number]), 9))
        works.append(staging.send(torch.full((3,), float(number)), 9))
    assert len(wire.sent) <= 1  # the first header at most: the rest stands behind the first copy
    go.set()
    for work in works:
        work.wait(LIMIT)
    assert [int(tensor[0]) for _, tensor in wire.sent] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [tensor.dtype for _, tensor in wire.sent] == [torch.int64, torch.float32] * 4


def test_host_buffers_are_used_again_but_not_while_they_are_copied_from(
    parts: tuple[HostStaging, Lazy, Wire],
) -> None:
    staging, device, _ = parts
    for number in range(5):
        staging.send(torch.full((2, 2), float(number)), 3).wait(LIMIT)
    assert staging.buffers.allocated == 1
    targets = []
    for _ in range(3):
        targets.append(torch.empty(2, 2))
        staging.recv(targets[-1], 3).wait(LIMIT)  # its copy is queued, and has not begun
        assert device.order.count("in") == 0
    assert staging.buffers.allocated == 3
    device.computing.mark().synchronize()
    assert [float(t[0, 0]) for t in targets] == [0, 1, 2]
    staging.recv(torch.empty(4, dtype=torch.int32).view(2, 2), 3).wait(LIMIT)  # as many bytes
    assert staging.buffers.allocated == 3


def test_a_receive_waits_for_the_memorys_last_use_and_its_consumer_for_it(
    parts: tuple[HostStaging, Lazy, Wire],
) -> None:
    staging, device, wire = parts
    target, seen = torch.full((3,), 1.0), []
    device.computing.queue(lambda: seen.append(target.clone()))  # an earlier user of the same memory
    work = staging.recv(target, 4)
    wire.send(torch.full((3,), 2.0), 4)
    work.wait(LIMIT)
    work.wait(LIMIT)  # again does nothing
    device.computing.queue(lambda: seen.append(target.clone()))
    assert not seen  # the host has waited for no computing
    device.computing.mark().synchronize()
    assert [float(value[0]) for value in seen] == [1, 2]


def test_a_failed_send_is_told_to_the_one_who_waits() -> None:
    def refuse(tensor: torch.Tensor, tag: int) -> object:
        raise RuntimeError("Broken pipe")

    staging = HostStaging(Lazy(), refuse, refuse, "rank 1", lambda tensor: True)
    with pytest.raises(RuntimeError, match="Broken pipe"):
        staging.send(torch.zeros(1), 1).wait(LIMIT)
    staging.close()
    staging.close()
    with pytest.raises(TransferClosedError):
        staging.send(torch.zeros(1), 1).wait(LIMIT)


def test_closing_ends_sends_that_wait_or_lets_them_begin() -> None:
    for finish in (True, False):
        device, wire, begun, go = Lazy(), Wire(), threading.Event(), threading.Event()
        staging = HostStaging(device, wire.send, wire.recv, "rank 1", lambda tensor: True)
        device.computing.queue(begun.set)
        device.computing.queue(lambda go=go: go.wait(20))
        works = [staging.send(torch.zeros(1), 1) for _ in range(3)]
        assert begun.wait(20)  # the thread waits for the first copy: that send has begun
        closer = threading.Thread(target=staging.close, kwargs={"finish": finish})
        closer.start()
        while not finish and not staging._closed:
            pass
        go.set()
        closer.join(20)
        assert not closer.is_alive()
        assert len(wire.sent) == (3 if finish else 1)
        works[0].wait(LIMIT)
        if not finish:
            with pytest.raises(TransferClosedError):
                works[-1].wait(LIMIT)


def test_a_device_without_streams_copies_at_once() -> None:
    wire = Wire()
    staging = HostStaging(BlockingCopyStreams(), wire.send, wire.recv, "rank 1", lambda tensor: True)
    work = staging.recv(target := torch.empty(2, 2), 1)
    staging.send(torch.arange(4.0).view(2, 2).t(), 1).wait(LIMIT)
    work.wait(LIMIT)
    assert torch.equal(target, torch.tensor([[0.0, 2.0], [1.0, 3.0]]))
    staging.close()


PEER = """
import sys, warnings
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
import json
import torch
from skyctl.transport.tls_identity import TlsIdentity
from skyctl.transport.peer_connection import PeerConnection
fields = json.loads(sys.stdin.readline())
identity = TlsIdentity(**fields) if fields else None
pair = PeerConnection("rank 0", 30.0, secret="s", identity=identity)
pair.connect("127.0.0.1", int(sys.argv[1]), timeout_s=30.0)
for _ in range(20):
    header, body = torch.empty(1, dtype=torch.int64), torch.empty(1000)
    pair.recv(header, 16).wait()
    pair.recv(body, 16).wait()
    pair.send(body + header, 16).wait()
pair.close(graceful=True)
"""


@pytest.mark.parametrize("tls", [None, make_tls_certificate()], ids=["clear", "tls"])
def test_a_pair_whose_tensors_are_on_a_device(tls: TlsIdentity | None) -> None:
    pair = PeerConnection("rank 1", 30.0, secret="s", identity=tls)
    port = pair.listen("127.0.0.1")
    process = subprocess.Popen(
        [sys.executable, "-c", PEER, str(port)], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdin is not None
        process.stdin.write(json.dumps(tls and asdict(tls)) + "\n")
        process.stdin.flush()
        pair.accept(PATIENCE_S)
        device = Lazy()
        staging = pair._start_staging(pair._transport, device)
        staging.stages = lambda tensor: tensor.is_floating_point()
        answers = [torch.empty(1000) for _ in range(20)]
        works = [pair.recv(answer, FIRST_TAG) for answer in answers]
        value = torch.zeros(1000)
        sent = []
        for number in range(20):
            device.computing.queue(lambda number=number: value.fill_(number))
            sent.append(pair.send(torch.tensor([100]), FIRST_TAG))
            sent.append(pair.send(value, FIRST_TAG))
            sent[-1].wait()  # value is used again
        for work in works + sent:
            work.wait()
        device.computing.mark().synchronize()
        assert [float(answer[-1]) for answer in answers] == [100.0 + n for n in range(20)]
        assert staging.buffers.allocated == 21  # one for the sends, and every receive was posted ahead
        pair.close(graceful=True)
        with pytest.raises(PeerLostError, match="closed"):
            pair.send(value, FIRST_TAG)
        _, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, err
    finally:
        pair.close()
        process.kill()
        process.communicate()
