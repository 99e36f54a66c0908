"""Rounds of real processes: local steps, then an average of weights, as one process does it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.helpers.rounding import rounding
from tests.worker import round_reference
from tests.worker.sums import ring, star
from tests.worker.test_resume import BATCH_NORM, keeping, resuming
from tests.worker.workloads import DROPOUT, edit_workload
from torch import nn

from skyctl.checkpoint.node import safetensors
from skyctl.worker.rank_order import RankOrder, RoundOptions
from skyctl.worker.rounds.round_start import RoundStart
from skyctl.workload.mixed_precision import master_of, to_low_precision
from skyctl.workload.recipe import Recipe

Workloads = Callable[..., dict[str, Any]]
LAYERS, MICROBATCHES, ROUNDS = 7, 3, 4
OWNERS = ("a", "b", "c+d")
OWN_DATA = [
    ("def data(batch_size, seed):", "def data(batch_size, seed, owner):"),
    ("manual_seed(seed)", "manual_seed(seed + 1000 * len(owner) + ord(owner[0]))"),
]
EXAMPLE = """
def example(batch_size):
    ids = torch.zeros(batch_size, 5, dtype=torch.int64) + 10
    ids[0] = 0
    return ids, ids[:, 0]
"""
AFFORDS = """
def local_steps(owner, round):
    return {"a": 5, "b": round % 3, "c+d": 1 if round != 2 else 0}[owner]
"""


def affords(owner: str, round_number: int) -> int:
    """As ``AFFORDS``."""
    return {"a": 5, "b": round_number % 3, "c+d": 1 if round_number != 2 else 0}[owner]


def owners_orders(
    driver: ModuleType, spec: dict[str, Any], steps: Sequence[int], rounds: int, **options: Any
) -> list[RankOrder]:
    """A rank an owner; ``round_options``: further fields of ``rounds``."""
    round_options = options.pop("round_options", {})
    count = len(steps)
    orders = driver.side_by_side(
        spec, LAYERS, [MICROBATCHES] * count, star(count, count - 1), rounds, **options
    )
    return [
        replace(
            order,
            microbatches=MICROBATCHES,
            microbatch_range=(0, MICROBATCHES),
            workload=replace(order.workload, owner=OWNERS[rank]),
            rounds=RoundOptions(steps[rank], owner=OWNERS[rank], index=rank, owners=count, **round_options),
        )
        for rank, order in enumerate(orders)
    ]


def is_as(done: Any, expected: round_reference.Rounds) -> None:
    """The same losses, and but for rounding the same weights: each round adds at most five steps."""
    assert not done.errors, done.errors
    assert done.losses == pytest.approx(expected.losses, rel=1e-5)
    steps_made = [[e["local_steps"] for e in events] for _, events in sorted(done.steps.items())]
    assert [list(row) for row in zip(*steps_made, strict=True)] == expected.steps_made
    own = [[e.get("own_loss") for e in events] for _, events in sorted(done.steps.items())]
    for losses, wanted in zip(zip(*own, strict=True), expected.own_losses, strict=True):
        assert list(losses) == [None if x is None else pytest.approx(x, rel=1e-5) for x in wanted]
    weights = safetensors.load(Path(done.results[0]["weights"]))
    assert set(weights) == set(expected.weights)
    for name, value in expected.weights.items():
        close = rounding(5 * len(expected.losses))
        torch.testing.assert_close(weights[name], value, rtol=close, atol=close)


@pytest.mark.parametrize(
    ("optimizer", "mu", "clip"),
    [("sgd", 0.0, None), ("sgd", 0.3, None), ("sgd", 0.3, 0.5), ("adamw", 0.0, None), ("adamw", 0.3, 0.5)],
)
def test_local_sgd_is_as_in_one_process(
    workload: Workloads, pool: Any, driver: ModuleType, optimizer: str, mu: float, clip: float | None
) -> None:
    """Unequal shares of common batches, and so unequal samples; momentum stays local."""
    spec = edit_workload(workload(optimizer, batch_size=8), DROPOUT)
    shares, steps = [3, 1, 2], [3, 3, 2]
    expected = round_reference.train(spec, 6, steps, ROUNDS, shares=shares, mu=mu, clip_norm=clip)
    recipe = Recipe(clip_norm=clip, total_steps=ROUNDS)
    orders = driver.side_by_side(spec, LAYERS, shares, ring(3), ROUNDS, weights=True, recipe=recipe.to_dict())
    orders = [
        replace(order, rounds=RoundOptions(asked, prox_mu=mu))
        for order, asked in zip(orders, steps, strict=True)
    ]
    is_as(pool.run(orders), expected)


@pytest.mark.parametrize(
    "round_options",
    [
        {},
        {"prox_mu": 1.0},
        {"drop_stragglers": True},
        {"prox_mu": 0.5, "clients": 2},
        {"clients": 1, "drop_stragglers": True},
    ],
    ids=["kept", "proximal", "dropped", "two a round", "one a round, dropped"],
)
def test_owners_are_as_in_one_process(
    workload: Workloads, pool: Any, driver: ModuleType, round_options: dict[str, Any]
) -> None:
    """Data of their own, partial work, and optimizers that are reset."""
    spec = edit_workload(workload("sgd", batch_size=6), *OWN_DATA, DROPOUT, text=EXAMPLE + AFFORDS)
    expected = round_reference.train(
        spec,
        MICROBATCHES,
        [5, 2, 3],
        6,
        owners=OWNERS,
        mu=round_options.get("prox_mu", 0.0),
        clients=round_options.get("clients"),
        drop=round_options.get("drop_stragglers", False),
        step_budget=affords,
    )
    is_as(
        pool.run(owners_orders(driver, spec, [5, 2, 3], 6, weights=True, round_options=round_options)),
        expected,
    )


@pytest.mark.parametrize("sync_format", ["bfloat16", "int8"])
def test_an_average_in_fewer_bytes_trains_nearly_as_well_and_resumes_to_the_bit(
    workload: Workloads, pool: Any, driver: ModuleType, tmp_path: Path, sync_format: str
) -> None:
    norm = (BATCH_NORM[0], "nn.BatchNorm1d(5), nn.GELU(), Head()")
    spec = edit_workload(workload("sgd", batch_size=6), *OWN_DATA, norm, text=EXAMPLE + AFFORDS)
    exact = pool.run(owners_orders(driver, spec, [5, 2, 3], 6))

    def run(name: str, **more: Any) -> Any:
        asked = {
            "sync": {"format": sync_format},
            "weights": True,
            "checkpoint": keeping(tmp_path / name),
            **more,
        }
        done = pool.run(owners_orders(driver, spec, [5, 2, 3], 6, **asked))
        assert not done.errors, done.errors
        return done

    whole = run("whole")
    assert whole.losses != exact.losses
    assert whole.losses == pytest.approx(exact.losses, rel=0.02)
    rest = run("rest", resume=resuming(whole, tmp_path / "whole", step=3))
    assert rest.losses == whole.losses[3:]
    first, second = (safetensors.load(Path(done.results[0]["weights"])) for done in (whole, rest))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_running_figures_are_averaged_by_samples(workload: Workloads, pool: Any, driver: ModuleType) -> None:
    """Of a norm that sees three, one and two batches of three microbatches."""
    norm = (BATCH_NORM[0], "nn.BatchNorm1d(5), nn.GELU(), Head()")
    spec = edit_workload(workload("sgd", batch_size=6), *OWN_DATA, norm, text=EXAMPLE)
    expected = round_reference.train(spec, MICROBATCHES, [3, 1, 2], 1, owners=OWNERS)
    done = pool.run(owners_orders(driver, spec, [3, 1, 2], 1, weights=True))
    assert not done.errors, done.errors
    weights = safetensors.load(Path(done.results[0]["weights"]))
    for name in ("4.running_mean", "4.running_var"):
        mean = sum(n * own[name] for n, own in zip((3, 1, 2), expected.buffers, strict=True)) / 6
        torch.testing.assert_close(weights[name], mean, rtol=1e-5, atol=1e-6)
    assert int(weights["4.num_batches_tracked"]) == 6 * MICROBATCHES


def test_a_round_that_everybody_is_dropped_from_changes_nothing(
    workload: Workloads, pool: Any, driver: ModuleType
) -> None:
    norm = (BATCH_NORM[0], "nn.BatchNorm1d(5), nn.GELU(), Head()")
    late = "\ndef local_steps(owner, round):\n    return 2 if round else 3\n"
    spec = edit_workload(workload("sgd", batch_size=6), *OWN_DATA, norm, text=EXAMPLE + late)
    round_options = {"drop_stragglers": True}
    one_round, three = (
        pool.run(owners_orders(driver, spec, [3, 3, 3], rounds, weights=True, round_options=round_options))
        for rounds in (1, 3)
    )
    assert not one_round.errors | three.errors
    assert three.losses == one_round.losses * 3
    before, after = (safetensors.load(Path(done.results[0]["weights"])) for done in (one_round, three))
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("low", [False, True])
def test_a_rounds_start_is_of_weights_with_other_memory_too(low: bool) -> None:
    """An optimizer that does ``p.data = …`` changes no weight in place."""
    layer = nn.Linear(3, 2, bias=False)
    if low:
        layer._parameters["weight"] = to_low_precision(
            layer.weight, layer.weight.detach().clone(), torch.bfloat16
        )
    start, master = RoundStart([layer]), master_of(layer.weight)
    master.data = torch.ones(2, 3)
    start.take()
    master.data = torch.full((2, 3), 3.0)
    master.grad = torch.zeros(2, 3)
    start.add_difference(0.5)
    assert torch.equal(master.grad, torch.ones(2, 3))
    start.restore()
    for weight in (master, layer.weight):
        assert torch.equal(weight.detach().float(), torch.ones(2, 3))
    assert torch.equal(start.of(layer.weight), torch.ones(2, 3))
