"""Forms whose intervals overlap are tried before a long run, which has the fastest; all are learnt from."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ..helpers.processes import left_of_state

if TYPE_CHECKING:
    from .conftest import Here

TRAIN = """\
import time
import torch
from torch import nn

class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
    def forward(self, x):
        time.sleep(0.003)  # more than sums take on a busy machine: several devices pay
        return self.linear(x)

def model():
    return [Slow() for _ in range(4)] + [nn.Linear(8, 3)]

def data(batch_size, seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        targets = torch.randint(3, (batch_size,), generator=generator)
        yield torch.randn(batch_size, 8, generator=generator), targets
"""
SIZES = ("--batch-size", "8", "--microbatches", "4")
RUN = ("launch", "train.py", *SIZES, "--parallel", "auto", "--steps", "340", "--checkpoint-every", "0", "-y")


@pytest.fixture(scope="module")
def hardly_known(another: Callable[..., Any]) -> Path:
    """A probed cluster, whose profile says that layers' times were all over the place."""
    made = another("fast", "slow")
    made.train(TRAIN)
    made.probe_briefly("train.py", *SIZES)
    (path,) = (made.state / "profiles").rglob("*.json")
    profile = json.loads(path.read_text())
    for device in profile["devices"]:
        for timing in device["timings"]:
            timing["spread"] = 4.0
    path.write_text(json.dumps(profile))
    folder: Path = made.folder.parent
    return folder


@pytest.fixture
def known(here: Here, hardly_known: Path) -> Here:
    """One of its own for each test."""
    shutil.copytree(hardly_known, here.folder.parent, dirs_exist_ok=True)
    return here


def made(here: Here) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The plan of the only run that is kept, and what the newest profile has seen."""
    (plan,) = (here.state / "runs").glob("*/plan.json")
    path = max((here.state / "profiles").rglob("*.json"))
    return json.loads(plan.read_text()), json.loads(path.read_text())["observations"]


@pytest.mark.slow
def test_the_form_with_the_shortest_measured_step_is_trained(known: Here) -> None:
    done = known.run_inside(*RUN, code=0)
    assert "predictions can't tell" in done.stdout
    plan, seen = made(known)
    measured = {one["parallel"]: one["measured_s"] for one in plan["forms"] if one["measured_s"]}
    assert len(measured) > 1
    assert measured[plan["problem"]["parallel"]] <= 1.01 * min(measured.values())
    assert f"the form is {plan['problem']['parallel']}" in done.stdout
    assert len({one["run_id"] for one in seen}) == len(measured) + 1, "each trial, and the run"
    assert left_of_state(known.state) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "said"), [(("--steps", "20", "--no-trial"), "--no-trial"), (("--steps", "20"), "too short")]
)
def test_without_a_trial_the_prediction_chooses(known: Here, more: tuple[str, ...], said: str) -> None:
    done = known.run_inside(*RUN, *more, code=0)
    assert "none of them is tried" in done.stderr
    assert said in done.stderr
    plan, seen = made(known)
    assert not any(one["measured_s"] for one in plan["forms"])
    assert len({one["run_id"] for one in seen}) <= 1


@pytest.mark.slow
def test_whoever_takes_a_run_over_hears_nothing_of_its_trials(known: Here) -> None:
    steps = RUN.index("--steps") + 1
    words = (*RUN[:steps], "100000", *RUN[steps + 1 :])
    done = known.run(*words, "--detach", code=0)
    assert "predictions can't tell" in done.stdout
    known.run_inside("stop", code=0)
    (log,) = (known.state / "runs").glob("*/supervisor.log")
    assert "warning" not in log.read_text()
    assert left_of_state(known.state) == []
