"""Many ranks, processes reused: no plan, schedule or number of microbatches makes them wait for ever.

A hang fails with the traces of every rank that waits (``driver.Pool``), not with a time-out of the test.
"""

from __future__ import annotations

import contextlib
import random
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from skyctl.schedule.actions import SCHEDULES, least_in_flight
from skyctl.worker.rank_order import RankOrder
from skyctl.workload.workload import load_workload
from skyctl.workload.workload_spec import WorkloadSpec

LAYERS = 20
TOLD = ("layers", "in_flight", "receive_window", "weights_behind")
MOST_MICROBATCHES = 20

WORKLOAD = """
import time
import torch
from torch import nn

class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        if not hasattr(x, "fake_mode"):
            time.sleep(0.0002)
        return x * weight
    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.0003)
        return gradient, gradient.sum()

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.linear = nn.Linear(16, 16)
    def forward(self, x):
        return self.linear(Sleep.apply(x, self.weight))

def model():
    return [Layer() for _ in range(LAYERS)]

def data(batch_size, seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(batch_size, 16, generator=generator), torch.zeros(batch_size)

def loss(outputs, targets):
    return (outputs.mean(1) - targets).square().mean()

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.01)
"""


def _random_orders(
    driver: ModuleType, base: WorkloadSpec, chance: random.Random, ranks: int
) -> list[RankOrder]:
    stages = chance.randint(2, ranks)
    microbatches = chance.randint(1, MOST_MICROBATCHES)
    schedule = chance.choice(SCHEDULES)
    cuts = [0, *sorted(chance.sample(range(1, LAYERS), stages - 1)), LAYERS]
    batch_size = microbatches * chance.randint(1, 2)
    spec = replace(base, batch_size=batch_size).to_dict()
    orders: list[RankOrder] = driver.orders(spec, cuts, microbatches, schedule, steps=2)
    deepest = microbatches
    for stage, order in enumerate(orders):
        changes: dict[str, Any] = {"receive_window": chance.choice((0, 1, 2, 3, microbatches))}
        if schedule in ("eager-1f1b", "zero-bubble"):
            least = least_in_flight(schedule, stage, stages, microbatches)
            deepest = changes["in_flight"] = chance.randint(least, max(least, deepest))
        if schedule == "zero-bubble":
            changes["weights_behind"] = chance.randint(0, microbatches - 1)
        else:
            changes["recompute"] = chance.random() < 0.3
        orders[stage] = replace(order, **changes)
    return orders


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "combinations"), [(8, 10), pytest.param(16, 200, marks=pytest.mark.matrix)]
)
def test_no_combination_hangs(driver: ModuleType, tmp_path: Path, ranks: int, combinations: int) -> None:
    path = tmp_path / "train.py"
    path.write_text(WORKLOAD.replace("LAYERS", str(LAYERS)))
    # with shapes filled in, as the launcher hands it out: no rank has to run the model on fake tensors
    base = load_workload(WorkloadSpec(source=str(path), path=str(path), seed=3)).spec
    chance = random.Random(4)
    with contextlib.closing(driver.Pool(ranks, tmp_path)) as pool:
        for number in range(combinations):
            orders = _random_orders(driver, base, chance, ranks)
            fields = [{key: getattr(order, key) for key in TOLD} for order in orders]
            what = f"combination {number}: {orders[0].schedule}, {orders[0].microbatches}, {fields}"
            try:
                outcome = pool.run(orders)
            except AssertionError as exc:
                raise AssertionError(f"{what}\n{exc}") from None
            assert not outcome.errors, f"{what}: {outcome.errors}"
            assert len(outcome.losses) == 2
