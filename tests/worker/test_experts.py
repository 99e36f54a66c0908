"""A workload whose layers hold experts: planned and trained as any other, its balance loss included."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.worker.sums import star
from tests.worker.test_losses import STEPS, reference

from skyctl.workload.costs import count_layer_costs
from skyctl.workload.workload import load_workload
from skyctl.workload.workload_spec import WorkloadSpec

SOURCE = """
import skyctl
import torch
from torch import nn

class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = skyctl.Experts(lambda: nn.Linear(8, 8), experts=6, top_k=2, features=8)
    def forward(self, given):
        x, balance = given
        y = x + self.experts(x)
        return y, balance + self.experts.balance_loss

class Head(nn.Linear):
    def forward(self, given):
        x, balance = given
        return super().forward(x), balance

class First(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y, y.new_zeros(())

def model():
    return [First(5, 8), Mixture(), Mixture(), Head(8, 3)]

def data(batch_size, seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 5, generator=generator)
        yield x, x[:, :3].argmax(1)

def loss(outputs, targets):
    scores, balance = outputs
    return nn.functional.cross_entropy(scores, targets) + 0.01 * balance

def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)
"""


@pytest.fixture
def spec(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "train.py"
    path.write_text(SOURCE)
    return WorkloadSpec(source=str(path), path=str(path), batch_size=8, seed=3).to_dict()


def test_shapes_and_costs_are_found(spec: dict[str, Any]) -> None:
    workload = load_workload(WorkloadSpec.from_dict(spec))
    for index in (1, 2, 3):
        assert [str(tensor) for tensor in workload.boundary(index, 64)] == ["float32[64, 8]", "float32[]"]
    costs = count_layer_costs(workload, 64)
    for layer in costs[1:3]:
        assert layer.flops == pytest.approx(3 * 2 * 64 * (6 * 8 + 2 * 8 * 8), rel=0.1)


def test_losses_do_not_depend_on_the_plan(spec: dict[str, Any], pool: Any, driver: ModuleType) -> None:
    losses, _ = reference(spec, 4)
    assert losses[-1] < losses[0]
    for orders in (
        driver.orders(spec, [0, 2, 4], 4, "1f1b", STEPS),
        driver.orders(spec, [0, 2, 4], 4, "1f1b", STEPS, recompute=True),
        driver.side_by_side(spec, 4, [3, 1], star(2), STEPS),
    ):
        outcome = pool.run(orders)
        assert not outcome.errors, outcome.errors
        assert outcome.losses == pytest.approx(losses, rel=1e-5)
