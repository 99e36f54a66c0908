"""DiLoCo: an outer optimizer on what each round's average changes, as torch does it in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.worker import round_reference
from tests.worker.sums import ring
from tests.worker.test_local_rounds import AFFORDS, EXAMPLE, MICROBATCHES, OWN_DATA, affords, owners_orders
from tests.worker.test_owner_pipelines import CUT, STEPS, of_owners, rank_orders
from tests.worker.test_resume import BATCH_NORM, keeping, resuming
from tests.worker.workloads import DROPOUT, edit_workload
from torch import nn

from skyctl.checkpoint.node import safetensors
from skyctl.errors import RecordError
from skyctl.worker.rank_order import RankOrder, RoundOptions
from skyctl.worker.rounds.local_rounds import make_outer_optimizer
from skyctl.worker.rounds.outer_optimizer import OuterOptimizer
from skyctl.workload.mixed_precision import master_of, to_low_precision
from skyctl.workload.recipe import Recipe

Workloads = Callable[..., dict[str, Any]]
LAYERS, ROUNDS, CLOSE = 7, 5, 1e-6
DILOCO = {"outer_lr": 0.7, "outer_momentum": 0.9}
NO_MOMENTUM = ("momentum=0.9", "momentum=0.0")
"""Inner momentum is local, and a checkpoint has the first pipeline's alone."""


def outer(lr: float, momentum: float) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    """As users of plain torch write it."""
    return partial(torch.optim.SGD, lr=lr, momentum=momentum, nesterov=momentum > 0)


def sharing(
    driver: ModuleType,
    spec: Any,
    shares: Sequence[int],
    steps: Sequence[int],
    round_options: Any,
    **options: Any,
) -> list[RankOrder]:
    """Ranks that share batches."""
    orders = driver.side_by_side(spec, LAYERS, shares, ring(len(shares)), ROUNDS, **options)
    return [
        replace(order, rounds=RoundOptions(asked, **round_options), weights=True)
        for order, asked in zip(orders, steps, strict=True)
    ]


def is_as(done: Any, expected: round_reference.Rounds) -> None:
    """Losses and weights of the simulation, within 1e-6."""
    assert not done.errors, done.errors
    assert done.losses == pytest.approx(expected.losses, rel=CLOSE)
    weights = weights_of(done)
    for name, value in expected.weights.items():
        if name in weights:
            torch.testing.assert_close(weights[name], value, rtol=CLOSE, atol=CLOSE)


def weights_of(done: Any, rank: int = 0) -> dict[str, torch.Tensor]:
    return safetensors.load(Path(done.results[rank]["weights"]))


def are_equal(weights: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return set(weights) == set(other) and all(torch.equal(weights[name], other[name]) for name in weights)


@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (0.5, 0.0), (1.0, 0.5)])
@pytest.mark.parametrize(("optimizer", "clip", "mu"), [("adamw", 0.5, 0.0), ("sgd", None, 0.3)])
def test_common_batches_in_unequal_shares(
    workload: Workloads,
    pool: Any,
    driver: ModuleType,
    optimizer: str,
    clip: float | None,
    mu: float,
    lr: float,
    momentum: float,
) -> None:
    """Inner optimizers keep their state; all replicas end with the same bytes."""
    spec = edit_workload(workload(optimizer, batch_size=8), DROPOUT)
    shares, steps = [3, 1, 2], [3, 3, 2]
    expected = round_reference.train(
        spec, 6, steps, ROUNDS, shares=shares, mu=mu, clip_norm=clip, outer=outer(lr, momentum)
    )
    recipe = Recipe(clip_norm=clip, total_steps=ROUNDS).to_dict()
    asked = {"prox_mu": mu, "outer_lr": lr, "outer_momentum": momentum}
    done = pool.run(sharing(driver, spec, shares, steps, asked, recipe=recipe))
    is_as(done, expected)
    first = weights_of(done)
    assert all(are_equal(first, weights_of(done, rank)) for rank in (1, 2))
    plain = round_reference.train(spec, 6, steps, ROUNDS, shares=shares, mu=mu, clip_norm=clip)
    assert expected.losses != pytest.approx(plain.losses, rel=1e-3)


@pytest.mark.parametrize(
    "more",
    [{}, {"prox_mu": 0.5, "clients": 2}, {"clients": 1, "drop_stragglers": True}],
    ids=["all", "two a round", "one a round, dropped"],
)
def test_owners_of_whom_some_take_part(
    workload: Workloads, pool: Any, driver: ModuleType, more: dict[str, Any]
) -> None:
    """A round in which nobody's samples count makes no outer step: neither weights nor momentum change."""
    spec = edit_workload(workload("sgd", batch_size=6), *OWN_DATA, DROPOUT, text=EXAMPLE + AFFORDS)
    expected = round_reference.train(
        spec, MICROBATCHES, [5, 2, 3], 6, owners=("a", "b", "c+d"), mu=more.get("prox_mu", 0.0),
        clients=more.get("clients"), drop=more.get("drop_stragglers", False), step_budget=affords,
        outer=outer(0.7, 0.9),
    )  # fmt: skip
    done = pool.run(owners_orders(driver, spec, [5, 2, 3], 6, weights=True, round_options=DILOCO | more))
    is_as(done, expected)
    if more.get("drop_stragglers"):
        assert expected.steps_made[3:] == [[5, 0, 0], [0, 0, 0], [0, 0, 0]], "momentum, then nobody's samples"


def test_an_owner_is_a_pipeline(workload: Workloads, pool: Any) -> None:
    """Replicas of a layer in stages of their own make the same step."""
    spec = edit_workload(workload("adamw", batch_size=6), *OWN_DATA, DROPOUT, text=EXAMPLE + AFFORDS)
    expected = round_reference.train(
        spec, MICROBATCHES, STEPS, 5, owners=list(CUT), clients=2, step_budget=affords, clip_norm=0.5,
        outer=outer(0.7, 0.9),
    )  # fmt: skip
    recipe = Recipe(clip_norm=0.5, total_steps=5).to_dict()
    orders = rank_orders(CUT, STEPS, spec, 5, DILOCO | {"clients_per_round": 2}, recipe=recipe)
    done = of_owners(pool.run([replace(order, weights=True) for order in orders]), [0, 1, 3])
    is_as(done, expected)
    parts = weights_of(done, 2) | weights_of(done, 3)
    assert are_equal(weights_of(done), parts)


@pytest.mark.parametrize("sync_format", ["float32", "bfloat16", "int8"])
def test_a_run_that_resumes_goes_on_to_the_bit(
    workload: Workloads, pool: Any, driver: ModuleType, tmp_path: Path, sync_format: str
) -> None:
    """Momentum is in the checkpoint; what a format loses is dropped where one is written, as ever."""
    norm = (BATCH_NORM[0], "nn.BatchNorm1d(5), nn.GELU(), Head()")
    spec = edit_workload(workload("sgd", batch_size=8), NO_MOMENTUM, norm)

    def run(name: str, lost: Sequence[str] = (), **more: Any) -> Any:
        options = {"sync": {"format": sync_format}, "checkpoint": keeping(tmp_path / name), **more}
        done = pool.run(sharing(driver, spec, [2, 1], [3, 3], DILOCO, **options))
        assert not done.errors, done.errors
        return done

    whole = run("whole")
    shards = sorted((tmp_path / "whole").rglob("layer-*.safetensors"))
    assert [name for name in safetensors.load(shards[0]) if name.startswith("outer.")] == [
        "outer.table.weight"
    ]
    rest = run("rest", resume=resuming(whole, tmp_path / "whole", step=3))
    assert rest.losses == whole.losses[3:]
    assert are_equal(weights_of(whole), weights_of(rest))
    exact = pool.run(sharing(driver, spec, [2, 1], [3, 3], DILOCO))
    if sync_format != "float32":
        assert exact.losses != whole.losses
    assert whole.losses == pytest.approx(exact.losses, rel=0.02)


def test_a_checkpoint_without_momentum_begins_with_none(
    workload: Workloads, pool: Any, driver: ModuleType, tmp_path: Path
) -> None:
    """And one that has some is gone on from by rounds without an outer step."""
    spec = edit_workload(workload("sgd", batch_size=8), NO_MOMENTUM)

    def run(name: str, asked: Any, **more: Any) -> Any:
        orders = sharing(
            driver, spec, [2, 1], [3, 3], asked, **{"checkpoint": keeping(tmp_path / name), **more}
        )
        done = pool.run(orders)
        assert not done.errors, done.errors
        return done

    plain, outside = run("plain", {}), run("outside", DILOCO)
    begun = run("begun", DILOCO, resume=resuming(plain, tmp_path / "plain", step=3))
    assert begun.losses[0] == plain.losses[3], "the first outer step comes after it"
    assert begun.losses[1] != plain.losses[4]
    dropped = run("dropped", {}, resume=resuming(outside, tmp_path / "outside", step=3))
    assert dropped.losses[0] == outside.losses[3]
    assert dropped.losses[1] != outside.losses[4]


def test_one_alone_steps_along_its_own_change(workload: Workloads, pool: Any, driver: ModuleType) -> None:
    """As where a run has lost all others."""
    spec = workload("sgd", batch_size=8)
    [order] = driver.orders(spec, [0, LAYERS], 3, "1f1b", ROUNDS, weights=True)
    expected = round_reference.train(spec, 3, [3], ROUNDS, shares=[3], outer=outer(0.7, 0.9))
    is_as(pool.run([replace(order, rounds=RoundOptions(3, **DILOCO))]), expected)


def test_at_rate_1_without_momentum_there_is_no_outer_optimizer() -> None:
    layers = [nn.Linear(3, 2)]
    assert make_outer_optimizer(None, layers) is None
    assert make_outer_optimizer(RoundOptions(steps=2), layers) is None
    assert make_outer_optimizer(RoundOptions(steps=2, outer_lr=1.0, outer_momentum=0.0), layers) is None
    assert make_outer_optimizer(RoundOptions(steps=2, outer_lr=0.5), layers) is not None
    assert make_outer_optimizer(RoundOptions(steps=2, outer_momentum=0.5), layers) is not None


@pytest.mark.parametrize("low", [False, True])
def test_a_step_is_nesterovs_of_the_masters(low: bool) -> None:
    """Twice, by hand; layers in low precision get what their masters are."""
    layer, frozen = nn.Linear(3, 2, bias=False), nn.Linear(2, 2).requires_grad_(requires_grad=False)
    if low:
        values = layer.weight.detach().clone()
        layer._parameters["weight"] = to_low_precision(layer.weight, values, torch.bfloat16)
    master = master_of(layer.weight)
    master.data = torch.ones(2, 3)
    outer = OuterOptimizer([layer, frozen], 0.5, 0.5)
    weight, momentum = 1.0, 0.0
    for average in (0.5, 2.0):
        outer.start.take()
        master.data = torch.full((2, 3), average)
        outer.step()
        gradient = weight - average
        momentum = gradient if not momentum else 0.5 * momentum + gradient
        weight -= 0.5 * (gradient + 0.5 * momentum)
        for tensor in (master, layer.weight):
            assert torch.equal(tensor.detach().float(), torch.full((2, 3), weight))
        kept = outer.momentum_of(layer.weight)
        assert kept is not None
        assert torch.equal(kept, torch.full((2, 3), momentum))
    assert outer.momentum_of(frozen.weight) is None
    with pytest.raises(RecordError, match=r"an outer momentum of shape \[3\] for a weight that is \[2, 3\]"):
        outer.restore_momentum(layer.weight, torch.ones(3))
    with pytest.raises(RecordError, match="for a weight that is not trained"):
        outer.restore_momentum(frozen.weight, torch.ones(2, 2))
    nothing = OuterOptimizer([frozen], 0.5, 0.5)
    nothing.step()
    assert nothing.momentum_of(frozen.weight) is None
