"""Layers that share a parameter train as in one process, however they are cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.helpers.rounding import rounding
from tests.worker import reference
from tests.worker.workloads import edit_workload

from skyctl.checkpoint.node import safetensors
from skyctl.worker.rank_order import RankOrder, RoutePlace, SumGroupOrder, SumOrder
from skyctl.workload.recipe import Recipe

Workloads = Callable[..., dict[str, Any]]
STEPS = 10
LAYERS = (0, 4, 6)
TIES = [
    ("nn.Linear(8, 8), nn.GELU(), Head())\n", "nn.Linear(8, 11, bias=False), Out(), Head())\n"),
    ("    return nn.Sequential(", "    layers = nn.Sequential("),
    (
        "Head())\n",
        "Head())\n"
        "    layers[4].weight = layers[6].linear.weight = layers[0].table.weight\n"
        "    return layers\n",
    ),
    (
        "class Head(",
        "class Out(nn.Module):\n    def forward(self, x):\n        return x[..., :8].tanh()\n\nclass Head(",
    ),
]


@pytest.fixture
def tied(workload: Workloads) -> Workloads:
    """The workload of ``workload``, with one table in its layers 0, 4 and 6."""

    def make(*args: Any) -> dict[str, Any]:
        return edit_workload(workload(*args), *TIES)

    return make


def holding(orders: list[RankOrder]) -> list[RankOrder]:
    """The orders with the sums of the copies of ``LAYERS``' table, as ``run.sum_spec`` makes them."""
    replicas = [
        rank for rank, order in enumerate(orders) if any(layer in range(*order.layers) for layer in LAYERS)
    ]
    root, *others = replicas
    for rank in replicas if others else ():
        children, parent = (tuple(others), None) if rank == root else ((), root)
        route = RoutePlace(1.0, children, parent, parent, children)
        sync = SumOrder("float32", 64, (SumGroupOrder(0, 0, (route,), tie=LAYERS),))
        hosts = {**orders[rank].world.hosts, **dict.fromkeys(sync.peers, "127.0.0.1")}
        world = replace(orders[rank].world, hosts=hosts)
        orders[rank] = replace(orders[rank], world=world, sync=sync)
    return orders


def tables(outcome: Any) -> list[torch.Tensor]:
    weights: dict[str, torch.Tensor] = {}
    for result in outcome.results.values():
        weights |= safetensors.load(Path(result["weights"]))
    return [weights[name] for name in ("0.table.weight", "4.weight", "6.linear.weight")]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_as_on_one_device(dtype: str, tied: Workloads, pool: Any, driver: ModuleType) -> None:
    spec = tied("adamw") | {"dtype": dtype}
    recipe = Recipe(clip_norm=0.4, total_steps=STEPS)
    expected = reference.train(spec, 4, recipe)
    # in float32 sums of 35 a step add up; in bfloat16 they are float32's, and what is kept of them is rounded
    tolerance = rounding(35 * STEPS) if dtype == "float32" else rounding(1, torch.bfloat16)
    for cuts, schedule in (
        ([0, 7], "1f1b"),
        ([0, 3, 7], "1f1b"),
        ([0, 2, 5, 7], "1f1b"),
        ([0, 1, 5, 7], "zero-bubble"),
    ):
        options = {"recipe": recipe.to_dict(), "weights": True}
        orders = driver.orders(spec, cuts, 4, schedule, STEPS, **options)
        outcome = pool.run(holding(orders))
        assert not outcome.errors, outcome.errors
        assert outcome.losses == pytest.approx(expected.losses, abs=tolerance), cuts
        norms = [event["grad_norm"] for event in outcome.steps[0]]
        assert norms == pytest.approx(expected.norms, rel=tolerance), "the table counts once"
        first, *others = tables(outcome)
        torch.testing.assert_close(first, expected.weights["0.table.weight"], rtol=tolerance, atol=tolerance)
        assert all(torch.equal(first, other) for other in others), cuts


def test_a_resume_with_another_cut_has_the_same_bits(
    tied: Workloads, pool: Any, driver: ModuleType, tmp_path: Path
) -> None:
    spec = tied("adamw")
    checkpoint = {"folder": str(tmp_path / "kept"), "every": 3, "keep": 3, "attempt": 1}
    options = {"weights": True, "checkpoint": checkpoint}
    first = pool.run(holding(driver.orders(spec, [0, 3, 7], 4, "1f1b", 3, **options)))
    assert not first.errors, first.errors
    kept = tables(first)[0]
    for cuts in ([0, 3, 7], [0, 7], [0, 2, 5, 7]):
        resume = {"step": 3, "folder": str(tmp_path / "kept")}
        orders = driver.orders(spec, cuts, 4, "1f1b", 3, weights=True, resume=resume)
        outcome = pool.run(holding(orders))
        assert not outcome.errors, outcome.errors
        assert all(torch.equal(table, kept) for table in tables(outcome)), cuts


def test_a_plan_that_would_let_copies_part_is_refused(tied: Workloads, pool: Any, driver: ModuleType) -> None:
    outcome = pool.run(driver.orders(tied("sgd"), [0, 3, 7], 4, "1f1b", 1))
    assert any("share parameters over stages" in str(event) for event in outcome.errors.values()), (
        outcome.errors
    )
