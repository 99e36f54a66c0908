"""The executor's parts, alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from skyctl.device.pace import Pace
from skyctl.errors import RunError, WorkloadError
from skyctl.worker.feed import Feed, split
from skyctl.worker.messages import Inbox, Outbox, message_bytes, torch_dtype, window
from skyctl.worker.stage import Stage
from skyctl.workload.shapes import TensorSpec

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

    def send(self, tensor: torch.Tensor, tag: int) -> Any:
        self.sent.append(tensor.clone())
        return self._work(self._count)

    def recv(self, tensor: torch.Tensor, tag: int) -> Any:
        self.posted += 1
        return self._work(lambda: tensor.copy_(self.sent.pop(0)))

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


def inbox(
    lane: Lane,
    *,
    specs: tuple[TensorSpec, ...] = (X,),
    ahead: int = 2,
    latency_s: float = 0.0,
    dtype: str | None = None,
) -> Inbox:
    pair: Any = lane
    return Inbox(
        pair,
        lambda _: specs,
        backward=False,
        microbatches=4,
        window=ahead,
        device=CPU,
        latency_s=latency_s,
        dtype=dtype,
    )


def outbox(
    lane: Lane, *, specs: tuple[TensorSpec, ...] = (X,), bound: int | None = None, dtype: str | None = None
) -> Outbox:
    pair: Any = lane
    return Outbox(pair, lambda _: specs, backward=False, microbatches=4, window=bound, dtype=dtype)


def test_receives_are_posted_ahead_up_to_the_window() -> None:
    lane = Lane()
    box = inbox(lane, ahead=3)
    box.begin(0)
    assert lane.posted == 6  # header and tensor each
    out = outbox(lane)
    for microbatch in range(4):
        out.send(0, microbatch, [torch.full((2, 3), float(microbatch))])
    for microbatch in range(4):
        taken = box.take(microbatch)
        assert taken.tensors[0][0, 0] == microbatch
        box.refill()
        assert lane.posted == min(8, 6 + 2 * (microbatch + 1))
    box.begin(1)  # nothing was left


def test_a_window_of_one_is_posted_again_at_once() -> None:
    lane = Lane()
    box = inbox(lane, ahead=1)
    box.begin(0)
    outbox(lane).send(0, 0, [torch.zeros(2, 3)])
    box.take(0)
    assert lane.posted == 4


def test_a_message_out_of_turn_is_an_error() -> None:
    lane = Lane()
    box = inbox(lane)
    box.begin(3)
    outbox(lane).send(2, 0, [torch.zeros(2, 3)])
    with pytest.raises(
        RunError, match=r"rank 1 sent microbatch 0 of step 2.* expected microbatch 0 of step 3"
    ):
        box.take(0)


def test_waiting_for_the_header_is_idle_and_for_the_rest_transfer() -> None:
    lane = Lane()
    box = inbox(lane, latency_s=0.01)
    box.begin(0)
    outbox(lane).send(0, 0, [torch.zeros(2, 3)], flags=1)
    lane.waits = [0.05, 0.03]
    taken = box.take(0)
    assert taken.flags == 1
    assert taken.idle_s >= 0.039  # 0.05 without the header's own way
    assert taken.transfer_s >= 0.039


def test_sends_are_let_go_when_confirmed_or_when_too_many() -> None:
    lane = Lane()
    box = outbox(lane)
    for microbatch in range(3):
        box.send(0, microbatch, [torch.zeros(2, 3)])
    assert lane.settled == 0
    box.confirm(1)
    assert lane.settled == 4
    box.drain()
    assert lane.settled == 6
    box = outbox(lane, bound=2)
    for microbatch in range(4):
        box.send(0, microbatch, [torch.zeros(2, 3)])
    assert lane.settled == 6 + 4


def test_what_is_sent_must_be_what_is_expected() -> None:
    with pytest.raises(RunError, match=r"its output is \[2, 4\] float32; a trial run gave \[2, 3\] float32"):
        outbox(Lane()).send(0, 0, [torch.zeros(2, 4)])
    empty = TensorSpec((0, 3), "float32", True)
    lane = Lane()
    outbox(lane, specs=(X, empty)).send(0, 0, [torch.zeros(2, 3), torch.zeros(0, 3)])
    assert len(lane.sent) == 2  # the empty one is not sent
    box = inbox(lane, specs=(X, empty))
    box.begin(0)
    assert box.take(0).tensors[1].shape == (0, 3)


@pytest.mark.parametrize(("dtype", "sent_bytes"), [("bfloat16", 24), ("int8", 16)])
def test_encoded_messages_arrive_as_they_were_and_their_buffers_are_used_again(
    dtype: str, sent_bytes: int
) -> None:
    wide = TensorSpec((3, 4), "float32", True)
    empty = TensorSpec((0, 3), "float32", True)
    lane = Lane()
    box = inbox(lane, specs=(wide, IDS, empty), ahead=1, dtype=dtype)
    out = outbox(lane, specs=(wide, IDS, empty), dtype=dtype)
    kept = []
    sent_from, received_in = [], []
    for step in range(2):
        box.begin(step)
        for microbatch in range(4):
            received_in.append(box._posted[0].coming[0].wire.data_ptr())
            values = torch.full((4, 3), float(10 * step + microbatch)).t()  # not contiguous
            assert out.send(step, microbatch, [values, torch.tensor([1, 2]), torch.zeros(0, 3)]) > 0
            sent_from.append(out._under_way[-1].wires[0].data_ptr())
            assert [t.numel() * t.element_size() for t in lane.sent] == [32, sent_bytes, 16]
            got = box.take(microbatch)
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
    box, out = inbox(lane, ahead=2), outbox(lane)
    for step in range(3):
        box.begin(step)
        for microbatch in range(4):
            out.send(step, microbatch, [torch.zeros(2, 3)])
        used = [id(sent.header) for sent in out._under_way]
        assert len(set(used)) == 4
        for microbatch in range(4):
            box.take(microbatch)
            box.refill()
        out.drain()
    assert len(out._buffers._headers) == 4
    assert len(box._buffers._headers) == 2


def test_window_follows_the_plan_or_the_size() -> None:
    assert message_bytes([X, IDS]) == 24 + 16
    assert window(3, 16, 1e9) == 3
    assert window(0, 16, 1000) == 8
    assert window(0, 4, 1000) == 4
    assert window(0, 16, 20 * 2**20) == 3
    assert window(0, 16, 1e9) == 2
    assert torch_dtype("torch.bfloat16") is torch_dtype("bfloat16") is torch.bfloat16
    with pytest.raises(RunError, match="unknown dtype 'float99'"):
        torch_dtype("float99")


def _stage(
    layers: list[nn.Module], takes: tuple[TensorSpec, ...], gives: tuple[TensorSpec, ...] | None
) -> Stage:
    return Stage(
        layers,
        takes=lambda _: takes,
        takes_tuple=len(takes) > 1,
        gives=None if gives is None else lambda _: gives,
        loss=None if gives is not None else lambda outputs, targets: (outputs - targets).square().mean(),
    )


def test_a_stage_may_change_its_input_in_place() -> None:
    weights = torch.randn(3, 3)
    x = torch.randn(2, 3)
    stage = _stage([nn.ReLU(inplace=True), nn.Linear(3, 3, bias=False)], (X,), (X,))
    stage.parameters[0].data.copy_(weights)
    (out,) = stage.forward(0, (x.clone(),))
    assert stage.kept == 1
    gradient = torch.ones(2, 3)
    (back,) = stage.backward(0, [gradient])
    assert stage.kept == 0
    leaf = x.clone().requires_grad_()
    expected = nn.functional.linear(leaf.relu(), weights)
    expected.backward(gradient)
    assert torch.equal(out, expected)
    assert torch.equal(back, leaf.grad if leaf.grad is not None else torch.empty(0))


@pytest.mark.parametrize("recompute", [True, False])
def test_a_list_is_given_on_as_a_tuple_also_within_a_stage(recompute: bool) -> None:
    class Both(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return [super().forward(x), x]

    class Sum(nn.Module):
        def forward(self, given: Any) -> torch.Tensor:
            assert isinstance(given, tuple)
            out: torch.Tensor = given[0] + given[1]
            return out

    stage = Stage(
        [Both(3, 3), Sum()],
        takes=lambda _: (X,),
        takes_tuple=False,
        gives=lambda _: (X,),
        loss=None,
        recompute=recompute,
    )
    assert stage.forward(0, (torch.ones(2, 3),))[0].shape == (2, 3)
    assert stage.backward(0, [torch.ones(2, 3)])[0].shape == (2, 3)


def test_unused_and_integer_inputs() -> None:
    class Pick(nn.Module):
        def forward(self, given: tuple[torch.Tensor, ...]) -> torch.Tensor:
            return given[0] * given[1].unsqueeze(-1)

    stage = _stage([Pick()], (X, IDS, X), (X,))
    stage.forward(0, (torch.ones(2, 3), torch.tensor([2, 3]), torch.ones(2, 3)))
    used, unused = stage.backward(0, [torch.ones(2, 3)])
    assert used.tolist() == [[2.0] * 3, [3.0] * 3]
    assert not unused.any()


def test_a_first_layer_may_change_the_batch_in_place() -> None:
    given = TensorSpec((2, 3), "float32", False)
    layer = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 3))
    stage = _stage([layer], (given,), (X,))
    for microbatch, part in enumerate(split(torch.randn(4, 3), [2, 2], CPU)):
        stage.forward(microbatch, (part,))
    for microbatch in range(2):
        stage.backward(microbatch, [torch.ones(2, 3)])
    assert layer[1].weight.grad is not None


def test_a_gradient_to_be_sent_is_not_added_to() -> None:
    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift, self.linear = nn.Parameter(torch.randn(1, 2, 3)), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            shift = self.shift.expand(x.shape[0], -1, -1)
            out: torch.Tensor = self.linear(x.view(-1, 2, 3) + shift)
            return out

    one = TensorSpec((1, 2, 3), "float32", True)  # of one sample, so both have the same gradient
    stage = _stage([Shift()], (one,), (one,))
    sent = []
    for microbatch in range(2):
        stage.forward(microbatch, (torch.randn(1, 2, 3),))
        (back,) = stage.backward(microbatch, [torch.randn(1, 2, 3)])
        sent.append((back, back.clone()))
    for back, was in sent:
        assert torch.equal(back, was)


def test_last_stage_weighs_its_loss_and_frozen_layers_pass_gradients() -> None:
    frozen = nn.Linear(3, 3)
    frozen.requires_grad_(False)
    stage = _stage([frozen], (X,), None)
    loss = stage.forward_loss(0, (torch.ones(2, 3),), torch.zeros(2, 3), 0.25)
    full = frozen(torch.ones(2, 3)).square().mean()
    assert loss.item() == pytest.approx(0.25 * full.item())
    (back,) = stage.backward(0, None)
    assert back.shape == (2, 3)
    assert frozen.weight.grad is None
    shared = _stage([nn.Linear(3, 3), frozen, frozen], (X,), None)
    assert len(shared.parameters) == 4


def test_slowdown_stretches_work_and_not_idling() -> None:
    def work() -> int:
        end = time.thread_time() + 0.01
        while time.thread_time() < end:
            pass
        return 7

    result, seconds, _ = Pace(3.0, single_thread=True, device=CPU).run(work)
    assert result == 7
    assert seconds >= 0.0299
    _, seconds, _ = Pace(3.0, single_thread=False, device=CPU).run(lambda: time.sleep(0.01))
    assert seconds >= 0.0299
    _, seconds, _ = Pace(1.0, single_thread=True, device=CPU).run(work)
    assert seconds >= 0.0099


def test_batches_are_fetched_ahead_unless_the_source_reuses_them() -> None:
    made = 0

    def fresh() -> Iterator[tuple[Any, Any]]:
        nonlocal made
        for i in range(4):
            made += 1
            yield torch.full((2,), i), torch.full((2,), i)

    feed = Feed(fresh())
    feed.get()
    feed.ahead()
    assert made == 1  # not known yet
    feed.get()
    feed.ahead()
    feed.ahead()
    assert made == 3
    assert feed.get()[0][0] == 2
    feed.get()
    with pytest.raises(WorkloadError, match="the data ended after 4 batches"):
        feed.get()

    def reused() -> Iterator[tuple[Any, Any]]:
        buffer = torch.zeros(2)
        for i in range(4):
            yield buffer.fill_(i), (buffer,)

    feed = Feed(reused())
    feed.get()
    assert feed.get()[0][0] == 1
    feed.ahead()
    assert feed.get()[0][0] == 2
