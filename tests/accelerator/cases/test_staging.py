"""Tensors of an accelerator between two ranks: through pinned host memory, on streams, behind events."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from skyctl.errors import RunError
from skyctl.transport import host_staging
from skyctl.transport.host_staging import AcceleratorCopyStreams, CopyStreams, StreamEvent, make_copy_streams
from skyctl.transport.peer_connection import FIRST_TAG, PeerConnection

TOY = torch.device("toy:0")
Pair = tuple[PeerConnection, PeerConnection]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ends = (PeerConnection("rank 1", 20.0, secret="s"), PeerConnection("rank 0", 20.0, secret="s"))
    port = ends[0].listen("127.0.0.1")
    caller = threading.Thread(target=ends[1].connect, args=("127.0.0.1", port))
    caller.start()
    ends[0].accept(20.0)
    caller.join(20.0)
    yield ends
    for end in ends:
        end.close()


def pass_on(pair: Pair, messages: int = 6) -> list[torch.Tensor]:
    """Computes on the device, sends, and computes with what the other end has received."""
    received = [torch.zeros(256, device=TOY) for _ in range(messages)]
    awaited = [pair[1].recv(tensor, FIRST_TAG) for tensor in received]
    values = torch.zeros(256, device=TOY)
    found = []
    for work, tensor in zip(awaited, received, strict=True):
        values += 1
        sent = pair[0].send(values, FIRST_TAG)
        work.wait()
        found.append(tensor * 10)
        sent.wait()
    return found


def test_what_is_sent_is_what_was_computed(pair: Pair) -> None:
    _, events, copies, _ = torch.ops.toy.counts()
    found = pass_on(pair)
    assert [float(tensor[-1]) for tensor in found] == [10.0, 20.0, 30.0, 40.0, 50.0, 60.0]
    _, events_now, copies_now, _ = torch.ops.toy.counts()
    assert copies_now - copies == 12
    assert events_now - events == 24, "one before each copy, and one behind it"


def test_a_buffer_is_not_filled_again_while_it_is_copied_from(pair: Pair) -> None:
    received = [torch.zeros(256, device=TOY) for _ in range(3)]
    for number, tensor in enumerate(received):
        work = pair[1].recv(tensor, FIRST_TAG)
        pair[0].send(torch.full((256,), float(number)), FIRST_TAG)
        work.wait()  # its copy to the device is queued, and has not begun
    assert [float(tensor[0]) for tensor in received] == [0.0, 1.0, 2.0]


def test_each_way_has_a_stream_of_its_own(pair: Pair) -> None:
    streams = make_copy_streams(TOY)
    assert isinstance(streams, AcceleratorCopyStreams)
    assert streams._out != streams._in != torch.accelerator.current_stream(TOY)
    assert streams.host(64).is_pinned()


class ConsumesAtOnce(AcceleratorCopyStreams):
    """Forgets that what is computed with a message must wait for its copy."""

    def consume(self, event: StreamEvent) -> None:
        pass


class CopiesAtOnce(AcceleratorCopyStreams):
    """Forgets that a copy must wait for what was queued before it."""

    def mark(self) -> StreamEvent:
        return torch.Event(TOY)


class SendsAtOnce(AcceleratorCopyStreams):
    """Forgets that a message must not be sent before it is copied."""

    def copy_out(self, tensor: torch.Tensor, host: torch.Tensor, after: StreamEvent) -> StreamEvent:
        super().copy_out(tensor, host, after)
        return torch.Event(TOY)


def breaking(kind: type[AcceleratorCopyStreams]) -> Callable[[torch.device], CopyStreams]:
    return lambda device: kind(device, torch.Stream(device), torch.Stream(device))


@pytest.mark.parametrize("kind", [ConsumesAtOnce, CopiesAtOnce, SendsAtOnce])
def test_a_use_before_its_event_fails(
    kind: type[AcceleratorCopyStreams], pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyctl.transport.peer_connection.make_copy_streams", breaking(kind))
    with pytest.raises((RuntimeError, RunError), match="does not come after"):
        pass_on(pair)
    torch.accelerator.synchronize(TOY)


def test_a_message_sent_before_its_copy_is_not_what_was_computed(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyctl.transport.peer_connection.make_copy_streams", breaking(SendsAtOnce))
    assert float(pass_on(pair, 1)[0][-1]) != 10.0
    torch.accelerator.synchronize(TOY)


def test_a_device_without_streams_copies_at_once(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """As MPS: torch refuses to make a stream."""

    def refuse(device: torch.device) -> torch.Stream:
        raise RuntimeError("Backend doesn't support create a new Stream.")

    monkeypatch.setattr(torch, "Stream", refuse)
    assert isinstance(make_copy_streams(TOY), host_staging.BlockingCopyStreams)
    assert [float(tensor[-1]) for tensor in pass_on(pair, 3)] == [10.0, 20.0, 30.0]
