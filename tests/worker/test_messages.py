"""Messages between stages: posted ahead, in turn, encoded, their buffers used again."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from skyctl.errors import RunError
from skyctl.transport.transfer_errors import PeerProtocolError
from skyctl.worker.pipeline.messages import (
    MessageReceiver,
    MessageSender,
    message_bytes,
    parse_dtype,
)
from skyctl.worker.pipeline.receive_window import receive_window
from skyctl.workload.shape_inference import TensorSpec

CPU = torch.device("cpu")
X = TensorSpec((2, 3), "float32", True)
IDS = TensorSpec((2,), "int64", False)


class Lane:
    """Both ends of a pair in one place: what is sent is received, in order, when it is waited for."""

    peer = "rank 1"

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []
        self.posted = 0
        self.waits: list[float] = []
        self.settled = 0
        self.latency_s = 0.0

    def send(self, tensor: torch.Tensor, tag: int) -> Any:
        self.sent.append(tensor.clone())
        return self._work(self._count)

    def recv(self, tensor: torch.Tensor, tag: int) -> Any:
        self.posted += 1
        return self._work(lambda: tensor.copy_(self.sent.pop(0)))

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

    def protocol_error(self, fault: str) -> PeerProtocolError:
        return PeerProtocolError(f"{self.peer} {fault}", peer_rank=1)

    def _count(self) -> None:
        self.settled += 1

    def _work(self, done: Any) -> Any:
        lane = self

        class Work:
            def wait(self, timeout_s: float | None = None) -> None:
                if lane.waits:
                    time.sleep(lane.waits.pop(0))
                done()

        return Work()


def receiver(
    lane: Lane,
    *,
    specs: tuple[TensorSpec, ...] = (X,),
    ahead: int = 2,
    dtype: str | None = None,
) -> MessageReceiver:
    pair: Any = lane
    return MessageReceiver(
        pair,
        lambda _: specs,
        backward=False,
        microbatches=4,
        window=ahead,
        device=CPU,
        link_dtype=dtype,
    )


def sender(
    lane: Lane, *, specs: tuple[TensorSpec, ...] = (X,), bound: int | None = None, dtype: str | None = None
) -> MessageSender:
    pair: Any = lane
    return MessageSender(
        pair, lambda _: specs, backward=False, microbatches=4, window=bound, link_dtype=dtype
    )


def test_receives_are_posted_ahead_up_to_the_window() -> None:
    lane = Lane()
    box = receiver(lane, ahead=3)
    box.begin(0)
    assert lane.posted == 6  # header and tensor each
    out = sender(lane)
    for microbatch in range(4):
        out.send(0, microbatch, [torch.full((2, 3), float(microbatch))])
    for microbatch in range(4):
        taken = box.receive(microbatch)
        assert taken.tensors[0][0, 0] == microbatch
        box.refill()
        assert lane.posted == min(8, 6 + 2 * (microbatch + 1))
    box.begin(1)  # nothing was left


def test_a_window_of_one_is_posted_again_at_once() -> None:
    lane = Lane()
    box = receiver(lane, ahead=1)
    box.begin(0)
    sender(lane).send(0, 0, [torch.zeros(2, 3)])
    box.receive(0)
    assert lane.posted == 4


def test_a_message_out_of_turn_is_an_error() -> None:
    lane = Lane()
    box = receiver(lane)
    box.begin(3)
    sender(lane).send(2, 0, [torch.zeros(2, 3)])
    with pytest.raises(
        RunError, match=r"rank 1 sent microbatch 0 of step 2.* expected microbatch 0 of step 3"
    ):
        box.receive(0)


def test_waiting_for_the_header_is_idle_and_for_the_rest_transfer() -> None:
    lane = Lane()
    lane.latency_s = 0.01
    box = receiver(lane)
    box.begin(0)
    sender(lane).send(0, 0, [torch.zeros(2, 3)], flags=1)
    lane.waits = [0.05, 0.03]
    taken = box.receive(0)
    assert taken.flags == 1
    assert taken.idle_s >= 0.039  # 0.05 without the header's own way
    assert taken.transfer_s >= 0.039


def test_sends_are_let_go_when_confirmed_or_when_too_many() -> None:
    lane = Lane()
    box = sender(lane)
    for microbatch in range(3):
        box.send(0, microbatch, [torch.zeros(2, 3)])
    assert lane.settled == 0
    box.confirm(1)
    assert lane.settled == 4
    box.drain()
    assert lane.settled == 6
    box = sender(lane, bound=2)
    for microbatch in range(4):
        box.send(0, microbatch, [torch.zeros(2, 3)])
    assert lane.settled == 6 + 4


def test_what_is_sent_must_be_what_is_expected() -> None:
    with pytest.raises(RunError, match=r"its output is \[2, 4\] float32; a trial run gave \[2, 3\] float32"):
        sender(Lane()).send(0, 0, [torch.zeros(2, 4)])
    empty = TensorSpec((0, 3), "float32", True)
    lane = Lane()
    sender(lane, specs=(X, empty)).send(0, 0, [torch.zeros(2, 3), torch.zeros(0, 3)])
    assert len(lane.sent) == 2  # the empty one is not sent
    box = receiver(lane, specs=(X, empty))
    box.begin(0)
    assert box.receive(0).tensors[1].shape == (0, 3)


@pytest.mark.parametrize(("dtype", "sent_bytes"), [("bfloat16", 24), ("int8", 16)])
def test_encoded_messages_arrive_as_they_were_and_their_buffers_are_used_again(
    dtype: str, sent_bytes: int
) -> None:
    wide = TensorSpec((3, 4), "float32", True)
    empty = TensorSpec((0, 3), "float32", True)
    lane = Lane()
    box = receiver(lane, specs=(wide, IDS, empty), ahead=1, dtype=dtype)
    out = sender(lane, specs=(wide, IDS, empty), dtype=dtype)
    kept = []
    sent_from, received_in = [], []
    for step in range(2):
        box.begin(step)
        for microbatch in range(4):
            received_in.append(box._posted[0].incoming[0].wire.data_ptr())
            values = torch.full((4, 3), float(10 * step + microbatch)).t()  # not contiguous
            assert out.send(step, microbatch, [values, torch.tensor([1, 2]), torch.zeros(0, 3)]) > 0
            sent_from.append(out._pending[-1].wires[0].data_ptr())
            assert [t.numel() * t.element_size() for t in lane.sent] == [32, sent_bytes, 16]
            got = box.receive(microbatch)
            assert got.transfer_s > 0
            kept.append((values, got.tensors))
            out.confirm(microbatch)
    assert len(set(sent_from)) == 1
    assert len(set(received_in)) == 1
    for values, (floats, ids, none) in kept:
        assert torch.allclose(floats, values, rtol=1e-6)
        assert ids.tolist() == [1, 2]
        assert none.shape == (0, 3)


def test_header_buffers_are_used_again_and_never_while_under_way() -> None:
    lane = Lane()
    box, out = receiver(lane, ahead=2), sender(lane)
    for step in range(3):
        box.begin(step)
        for microbatch in range(4):
            out.send(step, microbatch, [torch.zeros(2, 3)])
        used = [id(sent.header) for sent in out._pending]
        assert len(set(used)) == 4
        for microbatch in range(4):
            box.receive(microbatch)
            box.refill()
        out.drain()
    assert len(out._buffers._headers) == 4
    assert len(box._buffers._headers) == 2


def test_window_follows_the_plan_or_the_size() -> None:
    assert message_bytes([X, IDS]) == 24 + 16
    assert receive_window(3, 16, 1e9) == 3
    assert receive_window(0, 16, 1000) == 8
    assert receive_window(0, 4, 1000) == 4
    assert receive_window(0, 16, 20 * 2**20) == 3
    assert receive_window(0, 16, 1e9) == 2
    assert parse_dtype("torch.bfloat16") is parse_dtype("bfloat16") is torch.bfloat16
    with pytest.raises(RunError, match="unknown dtype 'float99'"):
        parse_dtype("float99")
