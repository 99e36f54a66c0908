"""A batch that memory does not hold at once is cut into more microbatches, with no option for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.commands import run_briefly

from skyctl.files import run_folder

WORKLOAD = """
import torch
from torch import nn

class Wide(nn.Module):
    '''Some 36 MB of a sample are kept for the backward.'''
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3000))
    def forward(self, x):
        return (x.unsqueeze(-1) * self.weight).sin().cos().mean(-1)

def model():
    return nn.Sequential(Wide(), nn.Linear(1000, 4))

def data(batch_size, seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 1000, generator=generator)
        yield x, (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()

def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets)

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.5)
"""
NODE = "nodes:\n  - {name: a, transport: local, threads: 1%s}\n"
STEPS = 2


@pytest.mark.slow
def test_losses_of_a_batch_are_the_same_whatever_the_memory(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WORKLOAD)
    (tmp_path / "cluster.yaml").write_text(NODE % "")
    wide, _ = launch(tmp_path, 32, "--microbatches", "8")
    four = wide["replicas"][0]["predicted"]["memory_bytes"]
    single, _ = launch(tmp_path, 32, "--microbatches", "32")
    one = single["replicas"][0]["predicted"]["memory_bytes"]
    most = (one + (four - one) / 6) / 2**30
    (tmp_path / "cluster.yaml").write_text(NODE % f", memory_gib: {most:.4f}")
    tight, plan = launch(tmp_path, 32)
    assert plan["problem"]["microbatches"] == 32
    assert losses(tight) == pytest.approx(losses(wide), rel=1e-5)
    _, plan = launch(tmp_path, 64)
    assert plan["problem"]["microbatches"] == 64, "two samples do not fit: these were measured afterwards"


def launch(folder: Path, batch: int, *words: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The measurement and the plan of a run whose number of microbatches the planner chooses."""
    asked = ("train.py", "--batch-size", str(batch), "--steps", str(STEPS), *words, "--json")
    done = run_briefly(folder, "launch", *asked)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    return measured, json.loads((run_folder(measured["run_id"]) / "plan.json").read_text())


def losses(measured: dict[str, Any]) -> list[float]:
    return [step["loss"] for step in measured["steps"]]
