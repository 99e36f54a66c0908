"""Holders of data-parallel plans whose process really lies in the sums of the gradients, in whole runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ..helpers import runs
from ..helpers.commands import Skyctl
from .backends import Over, unpromised
from .liars import (
    LIAR,
    SIZES,
    STEPS,
    honest_losses,
    lie_in_a_run,
    nothing_is_left,
    three_nodes,
    went_on_without_it,
    write_cluster,
)

pytestmark = pytest.mark.attack
FORM = ("--parallel", "data", "--assign", "a=2,b=1,c=1")

FROM_STEP = 7
TOO_LONG = unpromised("Gloo ends the process that gets a message longer than it expects")
TOO_SHORT = unpromised("Gloo takes a message that is shorter than expected")

TRAIN = """\
import os
import time

import torch
from torch import nn

LIE = os.environ.get("LIE")
FROM_STEP = 7


def lie():
    from skyctl.worker.sums import sum_messages
    from skyctl.worker.sums.sum_messages import AGREEMENT, HEADER, GRADIENTS, SumMessage, SumStamp

    honest = sum_messages.OutgoingMessages.send
    sent = {}

    def replaced(message, stamp):
        if LIE in ("kind", "chunk", "group"):
            message.stamp(stamp._replace(**{LIE: 9}))
        elif LIE == "length":
            longer = SumMessage(stamp.nbytes + 4)
            longer.stamp(stamp)
            return longer
        elif LIE == "dtype":
            narrow = SumMessage(stamp.nbytes // 2)
            narrow.payload.view(torch.bfloat16).copy_(message.payload.view(torch.float32))
            narrow.stamp(stamp)
            return narrow
        elif LIE == "replayed":
            return sent[stamp.route, stamp.direction]
        elif LIE == "nan":
            message.payload.view(torch.float32).fill_(float("nan"))
        elif LIE == "scale":
            message.payload[:4].view(torch.float32).fill_(-1.0)
        elif LIE == "silence":
            time.sleep(10_000)
        return message

    def send(self, message):
        stamp = SumStamp(*HEADER.unpack_from(message._memory)[:-1])
        if stamp.kind == GRADIENTS and stamp.step >= FROM_STEP:
            message = replaced(message, stamp)
        else:
            kept = sent[stamp.route, stamp.direction] = SumMessage(stamp.nbytes)
            kept.tensor.copy_(message.tensor)
        honest(self, message)

    sum_messages.OutgoingMessages.send = send


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        time.sleep(0.01)
        return self.linear(x)


def model():
    return [Layer() for _ in range(6)] + [nn.Linear(8, 3)]


def data(batch_size, seed):
    if LIE:
        lie()
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield (
            torch.randn(batch_size, 8, generator=generator),
            torch.randint(3, (batch_size,), generator=generator),
        )
"""


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Skyctl]:
    """Three nodes that each hold the whole model, in a ring; one of them will lie."""
    yield from three_nodes(tmp_path_factory, TRAIN, FORM)


@pytest.fixture(scope="module")
def losses(three: Skyctl) -> list[float]:
    return honest_losses(three)


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        ("kind", "sent unknown (9) of step 7"),
        ("chunk", "chunk 9"),
        ("group", "group 9"),
        pytest.param("length", "are expected", marks=TOO_LONG),
        pytest.param("dtype", "are expected", marks=TOO_SHORT),
        ("replayed", "of step 6"),
        ("nan", "with NaN or infinity, and what ranks add up is finite"),
    ],
)
def test_the_run_goes_on_without_it(
    three: Skyctl, losses: list[float], over: Over, lie: str, words: str
) -> None:
    over.attempt = f"a holder lies in a sum: {lie}"
    run, err = lie_in_a_run(three, over, lie)
    assert f"node {LIAR} sent rank " in err
    assert words in err
    went_on_without_it(run, err, losses)
    nothing_is_left(three)


def test_a_scale_of_int8_that_no_honest_holder_sends(three: Skyctl, over: Over) -> None:
    over.attempt = "a holder lies in a sum: scale of int8"
    three.run("plan", "train.py", *SIZES, *FORM, "--sync-format", "int8", "-o", "int8.json")
    run, err = lie_in_a_run(three, over, "scale", "int8.json")
    assert f"node {LIAR} sent rank " in err
    assert "with a scale of -1" in err
    assert run.state["untrusted"] == [LIAR]
    nothing_is_left(three)


def test_silence_is_named_as_ranks_that_wait_for_each_other(three: Skyctl, over: Over) -> None:
    over.attempt = "a holder is silent in a sum"
    write_cluster(three.folder, "silence")
    words = ("--steps", str(STEPS), "--checkpoint-every", "3", "--max-restarts", "0", *over.words)
    done = runs.launch(three, "plan.json", *words).end(1)
    assert "every rank has waited for another for 60 s" in done.stderr
    assert f"(node {LIAR}) waits in step 7, the sum of the gradients" in done.stderr
    nothing_is_left(three)
