"""Runs in which one rank's process really lies: the run goes on without its node, with the same losses."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from ..helpers.commands import Skyctl
from .backends import Over
from .liars import LIAR, honest_losses, lie_in_a_run, nothing_is_left, three_nodes, went_on_without_it

TRAIN = """\
import os
import sys
import time

import torch
from torch import nn

LIE = os.environ.get("LIE")


def channel():  # of those that have called this; the collector does not know of it any more
    frame = sys._getframe()
    while frame is not None:
        for one in frame.f_locals.values():
            if type(one).__name__ == "TaskChannel":
                return one
        frame = frame.f_back


def lie():
    if LIE == "nan":
        figures = dict.fromkeys(
            ("iteration_s", "compute_s", "transfer_s", "idle_s", "forward_s", "backward_s", "optimizer_s"),
            float("nan"),
        )
        channel().send({"event": "step", "step": 3, "loss": 1.0, "samples": 8, "validates": False, **figures})
    elif LIE == "deep":
        deep = []
        for _ in range(400):
            deep = [deep]
        channel().send({"event": "checkpoint", "step": 4, "layers": deep, "wall_s": 1.0})
    elif LIE == "weights":
        from skyctl.worker import trainer

        honest = trainer.save_weights

        def save(path, *rest):
            honest(path, *rest)
            os.truncate(path, 1 << 30)
            return str(path)

        trainer.save_weights = save
    elif LIE == "log":
        for _ in range(3000):
            print("x" * 30_000)


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.count = 0

    def forward(self, x):
        self.count += 1
        if self.count == 17 and LIE:
            lie()
        time.sleep(0.01)
        return self.linear(x)


def model():
    return [Stage() for _ in range(6)] + [nn.Linear(8, 3)]


def data(batch_size, seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield (
            torch.randn(batch_size, 8, generator=generator),
            torch.randint(3, (batch_size,), generator=generator),
        )
"""


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Skyctl]:
    """Three nodes, and a plan that has the last stage on the one that will lie."""
    yield from three_nodes(tmp_path_factory, TRAIN, ("--assign", "a=0:2,b=2:4,c=4:7"))


@pytest.fixture(scope="module")
def losses(three: Skyctl) -> list[float]:
    return honest_losses(three)


@pytest.mark.attack
@pytest.mark.parametrize(
    ("lie", "words"),
    [
        ("nan", "node c sent 'step' with iteration_s: nan is no number"),
        ("deep", "node c sent 'checkpoint' with layers: list is no dict"),
        ("weights", "weights-2.safetensors of node c is 1073741824 bytes large"),
    ],
)
def test_the_run_goes_on_without_it(
    three: Skyctl, losses: list[float], over: Over, lie: str, words: str
) -> None:
    over.attempt = "a rank lies to the launcher"
    run, err = lie_in_a_run(three, over, lie)
    assert words in err
    went_on_without_it(run, err, losses)
    state = run.state
    assert words in state["lost"][LIAR]
    assert state["attempts"][1]["why"] == f"node {LIAR} was lost"
    assert (run.folder / "weights.safetensors").stat().st_size < 1 << 20
    assert sum(path.stat().st_size for path in run.folder.rglob("*") if path.is_file()) < 8 << 20
    assert "NaN" not in (run.folder / "attempts/1/events.jsonl").read_text()
    nothing_is_left(three)


@pytest.mark.attack
def test_a_log_without_end_ends(three: Skyctl, losses: list[float], over: Over) -> None:
    over.attempt = "a rank prints without end"
    run, err = lie_in_a_run(three, over, "log")
    run.is_as(losses, 1)
    log = run.folder / "attempts/1/logs/rank-002.log"
    assert 60 << 20 < log.stat().st_size <= 65 << 20
    assert log.read_text().splitlines()[-1].startswith("[skyctl: the log ends here: it has 64 MiB]")
    assert err.count("rank-002.log has reached 64 MiB: no more of what it prints is kept") == 1
    assert json.loads((run.folder / "state.json").read_text())["lost"] == {}
