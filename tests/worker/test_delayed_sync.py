"""Sums that are applied a step later: as a plain loop does it, with early ends, and over resumed runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.helpers.orders import with_sync
from tests.helpers.rounding import rounding
from tests.worker import reference
from tests.worker.sums import ring, star
from tests.worker.test_data_parallel import SCHEDULER
from tests.worker.test_gradient_sync import packed_trees
from tests.worker.test_hybrids import CROSSED, FORMS, rank_orders
from tests.worker.test_resume import BATCH_NORM, NORM, keeping, resuming
from tests.worker.workloads import DROPOUT, LAYERS, VALIDATION, edit_workload

from skyctl.checkpoint.node import safetensors
from skyctl.worker.rank_order import RankOrder
from skyctl.worker.updates.update_delay import UpdateDelay
from skyctl.workload.recipe import Recipe

Workloads = Callable[..., dict[str, Any]]
STEPS = 12
CLOSE = rounding(STEPS)
"""Of weights, which are at most 1: each step adds its update, of which the rounding is a small part."""
RECIPE = Recipe(
    clip_norm=0.5, lr_schedule="cosine", warmup_steps=2, validate_every=5, validate_batches=2,
    total_steps=STEPS,
)  # fmt: skip


def delayed(orders: list[RankOrder], undelayed_steps: int = 0) -> list[RankOrder]:
    """The same ranks, with a delay where they sum anything."""
    return [
        order if order.sync is None else with_sync(order, delay=True, undelayed_steps=undelayed_steps)
        for order in orders
    ]


def are_close(path: str, expected: dict[str, torch.Tensor]) -> None:
    weights = safetensors.load(Path(path))
    for key, tensor in expected.items():
        torch.testing.assert_close(weights[key], tensor, rtol=0.0, atol=CLOSE)


@pytest.mark.parametrize("undelayed", [0, 3])
def test_replicas_train_as_a_loop_that_applies_gradients_a_step_later(
    workload: Workloads, pool: Any, driver: ModuleType, tmp_path: Path, undelayed: int
) -> None:
    """Seven samples in four microbatches, clipped, with dropout, a schedule, validations, checkpoints."""
    spec = edit_workload(workload("sgd"), DROPOUT, text=VALIDATION)
    settles = UpdateDelay(STEPS, undelayed, (5, 4)).settles
    assert [step for step in range(3, STEPS) if settles(step)] == [3, 4, 7, 9, 11]
    expected = reference.train(spec, 4, RECIPE, settles)
    plain = reference.train(spec, 4, RECIPE)
    assert plain.losses[undelayed + 2 :] != pytest.approx(expected.losses[undelayed + 2 :], rel=1e-4)
    plans = {
        "ring": ([2, 1, 1], ring(3)),
        "star": ([1, 3], star(2, root=1)),
        "trees": ([1, 2, 1], packed_trees()),
    }
    for name, (shares, routes) in plans.items():
        kept = keeping(tmp_path / name, every=4)
        orders = driver.side_by_side(
            spec, LAYERS, shares, routes, STEPS, recipe=RECIPE.to_dict(), weights=True, checkpoint=kept
        )
        done = pool.run(delayed(orders, undelayed))
        assert not done.errors, (name, done.errors)
        assert done.losses == pytest.approx(expected.losses, rel=1e-5), name
        assert done.validation == pytest.approx(expected.validation, rel=1e-5)
        are_close(done.results[0]["weights"], expected.weights)
        norms, rates = ([event[key] for event in done.steps[0]] for key in ("grad_norm", "learning_rate"))
        for step, norm in enumerate(
            norms
        ):  # of what was applied last; nothing is in the step after a settled one
            applied = step if settles(step) else step - 1
            waits = applied < 0 or (applied < step and settles(applied))
            assert norm == (None if waits else pytest.approx(expected.norms[applied], rel=1e-5))
        assert rates == pytest.approx(expected.rates)
        for checkpoint, other in zip(done.checkpoints[0], done.checkpoints[1], strict=True):
            assert checkpoint["sketches"] == other["sketches"], "both hold the same"


def test_a_run_that_goes_on_from_a_checkpoint_is_the_same_to_the_last_bit(
    workload: Workloads, pool: Any, driver: ModuleType, tmp_path: Path
) -> None:
    """And so is one over other routes as far as sums allow, and one pipeline goes on from there."""
    spec = edit_workload(workload(), DROPOUT, text=SCHEDULER)
    whole, rest = keeping(tmp_path / "whole", every=4, keep=0), keeping(tmp_path / "rest", every=4)

    def run(shares: list[int], routes: Any, **options: Any) -> Any:
        orders = driver.side_by_side(spec, LAYERS, shares, routes, STEPS, weights=True, **options)
        done = pool.run(delayed(orders))
        assert not done.errors, done.errors
        return done

    first = run([2, 1, 1], ring(3), checkpoint=whole)
    at = resuming(first, tmp_path / "whole", step=4)
    second = run([2, 1, 1], ring(3), checkpoint=rest, resume=at)
    assert second.losses == first.losses[4:]
    weights = [safetensors.load(Path(done.results[0]["weights"])) for done in (first, second)]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    other = run([1, 3], star(2), checkpoint=keeping(tmp_path / "other", every=4), resume=at)
    assert other.losses == pytest.approx(first.losses[4:], rel=1e-4)
    cut = driver.orders(spec, [0, 3, 7], 4, "1f1b", STEPS, resume=at)
    done = pool.run(cut)
    assert not done.errors, done.errors
    assert done.losses[0] == pytest.approx(first.losses[4], rel=1e-5)


def test_a_stop_ends_all_with_the_same_step(
    workload: Workloads, pool: Any, driver: ModuleType, tmp_path: Path
) -> None:
    """Whichever rank is told; the last step settles, so its checkpoint is of as many updates as steps."""
    spec = edit_workload(workload(batch_size=8), BATCH_NORM, text=NORM)
    kept = keeping(tmp_path / "r", every=0, at_end=True)
    for asked in (0, 2):

        def stop(pool: Any, rank: int, event: dict[str, Any], asked: int = asked) -> None:
            if event["event"] == "step" and event["step"] == 3 and rank == asked:
                pool.processes[asked].send({"op": "stop"})

        orders = driver.side_by_side(
            spec, LAYERS, [1, 2, 1], ring(3), 500, checkpoint=kept, weights=True, sync={"format": "bfloat16"}
        )
        done = pool.run(delayed(orders), stop)
        assert not done.errors, done.errors
        [steps] = {result["steps"] for result in done.results.values()}
        assert 4 < steps < 500, "all end after the same step"
        sketches = [done.checkpoints[rank][-1]["sketches"] for rank in range(3)]
        assert sketches[0] == sketches[1] == sketches[2]
        weights = safetensors.load(Path(done.results[0]["weights"]))
        assert int(weights["4.norm.num_batches_tracked"]) == 4 * steps, "the batches of all replicas"


def test_pipelines_with_cuts_of_their_own(workload: Workloads, pool: Any, tmp_path: Path) -> None:
    """Three groups; clipped over stages, one validates; and any stage may be the one that is stopped."""
    spec = edit_workload(workload("sgd", batch_size=8), text=VALIDATION)
    expected = reference.train(spec, 6, RECIPE, UpdateDelay(STEPS, 0, (5,)).settles)
    for star_routes in (False, True):
        orders = rank_orders(CROSSED, spec, STEPS, star=star_routes, recipe=RECIPE.to_dict(), weights=True)
        done = pool.run(delayed(orders))
        assert not done.errors, done.errors
        assert done.losses == pytest.approx(expected.losses, rel=1e-5)
        assert done.validation == pytest.approx(expected.validation, rel=1e-5)
        for rank in (0, 1):
            stage = safetensors.load(Path(done.results[rank]["weights"]))
            for key, tensor in stage.items():
                torch.testing.assert_close(tensor, expected.weights[key], rtol=0.0, atol=CLOSE)

    def stop(pool: Any, rank: int, event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["step"] == 3 and rank == 2:
            pool.processes[2].send({"op": "stop"})

    kept = keeping(tmp_path / "r", every=0, at_end=True)
    done = pool.run(delayed(rank_orders(CROSSED, spec, 500, checkpoint=kept)), stop)
    assert not done.errors, done.errors
    [steps] = {result["steps"] for result in done.results.values()}
    assert 4 < steps < 500


def test_one_pipeline_has_nothing_to_put_off(workload: Workloads, pool: Any) -> None:
    spec = workload(batch_size=8)
    plain = pool.run(rank_orders(FORMS["pipeline"], spec, 6))
    assert pool.run(delayed(rank_orders(FORMS["pipeline"], spec, 6))).losses == plain.losses


def test_fixed32_is_refused(workload: Workloads, pool: Any, driver: ModuleType) -> None:
    orders = driver.side_by_side(
        workload(), LAYERS, [1, 3], ring(2), 3, sync={"format": "fixed32", "delay": True}
    )
    done = pool.run(orders)
    assert any("make a step again" in event["message"] for event in done.errors.values()), done.errors
