"""Pipelines side by side train as one device does: losses, clipping, dropout, checkpoints, norms."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.planner.route_graphs import mesh
from tests.worker import reference
from tests.worker.sums import RouteEdges, connected, places, ring, star, together
from tests.worker.test_resume import BATCH_NORM, NORM, keeping, resuming
from tests.worker.workloads import DROPOUT, VALIDATION, edit_workload
from torch import nn

from skyctl.checkpoint.node import safetensors
from skyctl.errors import WorkloadError
from skyctl.planner.routes.route_choice import route_choices
from skyctl.planner.routes.tree_packing import pack_trees
from skyctl.worker.rank_order import SumGroupOrder
from skyctl.worker.sums.gradient_sync import GradientSync
from skyctl.worker.sums.summed_gradients import check_summable
from skyctl.workload.mixed_precision import to_low_precision
from skyctl.workload.recipe import Recipe

Workloads = Callable[..., dict[str, Any]]
LAYERS, STEPS = 7, 6
RECIPE = Recipe(clip_norm=0.5, lr_schedule="cosine", warmup_steps=2, validate_every=3, total_steps=STEPS)


def test_losses_are_those_of_one_device(
    workload: Workloads, pool: Any, driver: ModuleType, tmp_path: Path
) -> None:
    """Seven samples in four microbatches (2 2 2 1), clipped, with dropout, a schedule and validations."""
    spec = edit_workload(workload(), DROPOUT, text=VALIDATION)
    expected = reference.train(spec, 4, RECIPE)
    kept = tmp_path / "r"
    options: dict[str, Any] = {"recipe": RECIPE.to_dict(), "weights": True}
    plans = {
        "one": ([4], star(1), {}),
        "two": ([1, 3], ring(2), {"checkpoint": keeping(kept), "recompute": True}),
        "three": ([2, 1, 1], ring(3), {}),
        "star": ([1, 1, 2], star(3, root=1), {"sync": {"chunk_bytes": 1 << 20}, "schedule": "zero-bubble"}),
        "trees": ([1, 2, 1], packed_trees(), {}),
    }
    outcomes = {}
    for name, (shares, routes, more) in plans.items():
        orders = driver.side_by_side(spec, LAYERS, shares, routes, STEPS, **options, **more)
        done = outcomes[name] = pool.run(orders)
        assert not done.errors, (name, done.errors)
        assert done.losses == pytest.approx(expected.losses, rel=1e-5), name
        assert [event["grad_norm"] for event in done.steps[0]] == pytest.approx(expected.norms, rel=1e-5)
        assert done.validation == pytest.approx(expected.validation, rel=1e-5)
        assert all(event["sync_s"] >= 0.0 for events in done.steps.values() for event in events)
        assert [done.results[rank].get("weights") is None for rank in done.results].count(False) == 1
        weights = safetensors.load(Path(done.results[0]["weights"]))
        for key, tensor in expected.weights.items():
            torch.testing.assert_close(weights[key], tensor, rtol=1e-4, atol=1e-5)
    again = pool.run(driver.side_by_side(spec, LAYERS, *plans["three"][:2], STEPS, **options))
    assert again.losses == outcomes["three"].losses, "the same plan twice: to the last bit"

    sketches = [outcomes["two"].checkpoints[rank][-1]["sketches"] for rank in (0, 1)]
    assert sketches[0] == sketches[1], "both hold the same"
    resume = resuming(outcomes["two"], kept, step=3)
    cut = driver.orders(spec, [0, 3, 7], 4, "1f1b", STEPS, resume=resume, **options)
    rest = pool.run(cut)
    assert not rest.errors, rest.errors
    assert rest.losses == pytest.approx(expected.losses[3:], rel=1e-5), "a pipeline goes on from it"
    back = tmp_path / "back"
    cut = driver.orders(spec, [0, 3, 7], 4, "1f1b", STEPS, checkpoint=keeping(back), recipe=RECIPE.to_dict())
    resume = resuming(pool.run(cut), back, step=3)
    shares, routes, _ = plans["three"]
    rest = pool.run(driver.side_by_side(spec, LAYERS, shares, routes, STEPS, resume=resume, **options))
    assert rest.losses == pytest.approx(expected.losses[3:], rel=1e-5), "and they from a pipeline's"


def packed_trees() -> list[RouteEdges]:
    """The routes of a plan for three devices with links of 40, 20 and 10 Mbit/s, by rank."""
    network = mesh(3, {(0, 1): 40, (1, 2): 20, (0, 2): 10})
    *_, routes = route_choices(network, pack_trees(network, math.inf))
    assert len(routes) > 1
    return [(share, tree.root, list(tree.up), list(tree.down)) for share, tree in routes]


def test_rounded_sums_running_figures_and_an_early_end(
    workload: Workloads, pool: Any, driver: ModuleType, tmp_path: Path
) -> None:
    spec = edit_workload(workload(batch_size=8), BATCH_NORM, text=NORM)
    kept = keeping(tmp_path / "r", every=0, at_end=True)

    def stop(pool: Any, rank: int, event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["step"] == 1 and rank == 0:
            pool.processes[0].send({"op": "stop"})

    orders = driver.side_by_side(
        spec, LAYERS, [1, 2, 1], ring(3), 500, checkpoint=kept, weights=True, sync={"format": "bfloat16"}
    )
    done = pool.run(orders, stop)
    assert not done.errors, done.errors
    [steps] = {result["steps"] for result in done.results.values()}
    assert 2 < steps < 500, "all end after the same step"
    sketches = [done.checkpoints[rank][-1]["sketches"] for rank in range(3)]
    assert sketches[0] == sketches[1] == sketches[2]
    weights = safetensors.load(Path(done.results[0]["weights"]))
    assert int(weights["4.norm.num_batches_tracked"]) == 4 * steps, "the batches of all replicas"


def test_gradients_that_are_none_unused_or_transposed() -> None:
    """Layer 1 is used by rank 0 alone, layer 2 by nobody; layer 3's gradients are not contiguous."""
    with connected(ring(2), 2) as ends:

        def act(rank: int) -> list[Any]:
            torch.manual_seed(0)
            layers = [nn.Linear(3, 3, bias=False) for _ in range(4)]
            group = SumGroupOrder(0, 0, tuple(places(ring(2), rank)), start=5, stop=9)
            sync = GradientSync(layers, 5, [group], ends[rank], chunk_bytes=8, share=0.5)
            steps: list[Any] = []
            for step in range(2):
                x = torch.full((1, 3), float(rank + 1))
                y = layers[0](x)
                y = layers[1](y) if rank == 0 else y
                loss = layers[3](y).sum()
                sync.begin(step, early=False)  # else sums are under way when the test looks
                loss.backward()
                own = layers[3].weight.grad.clone()
                layers[3].weight.grad = layers[3].weight.grad.t().contiguous().t()
                report = sync.finish(is_last=rank == 1 and step == 1)
                assert report.is_last == (step == 1)
                steps.append((own, [layer.weight.grad for layer in layers]))
                for layer in layers:
                    layer.weight.grad = None
            sync.close()
            return steps

        first, second = together(2, act)
    for (own, mine), (other, theirs) in zip(first, second, strict=True):
        assert (mine[2], theirs[2]) == (None, None)
        assert all(torch.equal(mine[i], theirs[i]) for i in (0, 1, 3))
        assert mine[1].abs().sum() > 0
        torch.testing.assert_close(mine[3], own + other)


def test_the_last_layers_group_is_summed_while_the_first_ones_backward_still_runs() -> None:
    """Rank 0 holds all four layers, rank 1 the first two and rank 2 the last two."""
    held = [range(4), range(2), range(2, 4)]
    routes = [star(2, root=1), [(1.0, 2, [(0, 2)], [(2, 0)])]]
    last = [nn.Linear(2, 2, bias=False) for _ in range(2)]

    def is_summed() -> bool:
        gradients = [layer.weight.grad for layer in last]  # None until rank 2 has made its first backward
        return all(grad is not None and bool(torch.all(grad == 3.0)) for grad in gradients)

    with connected([*routes[0], *routes[1]], 3) as ends:

        def act(rank: int) -> list[float]:
            layers = last if rank == 2 else [nn.Linear(2, 2, bias=False) for _ in held[rank]]
            start = held[rank].start
            groups = [
                SumGroupOrder(n, 4 * n, tuple(places(route, rank)), start=2 * n, stop=2 * n + 2)
                for n, route in enumerate(routes)
                if 2 * n in held[rank]
            ]
            sync = GradientSync(layers, start, groups, ends[rank], chunk_bytes=8, share=0.5)
            sync.begin(0)
            seen = []
            for number in reversed(range(len(layers))):
                if rank == 0 and number == 0:
                    seen.append(_comes_true(is_summed))
                layers[number](torch.full((1, 2), max(1.0, float(rank)))).sum().backward()
            sync.finish(is_last=False)
            sync.close()
            assert all(seen)
            return [layer.weight.grad.mean().item() for layer in layers]

        outcomes = together(3, act)
    assert outcomes == [[2.0, 2.0, 3.0, 3.0], [2.0, 2.0], [3.0, 3.0]]


def _comes_true(happened: Callable[[], bool]) -> bool:
    """Waits for that for up to 20 s."""
    until = time.monotonic() + 20.0
    while not (is_true := happened()) and time.monotonic() < until:
        time.sleep(0.002)
    return is_true


def test_masters_gradients_are_summed() -> None:
    with connected(star(2), 2) as ends:

        def act(rank: int) -> Any:
            layer = nn.Linear(2, 1, bias=False)
            layer.weight = to_low_precision(layer.weight, torch.ones(1, 2), torch.bfloat16)  # type: ignore[assignment]
            group = SumGroupOrder(0, 0, tuple(places(star(2), rank)), start=0, stop=1)
            sync = GradientSync([layer], 0, [group], ends[rank], share=0.5)
            sync.begin(0)
            layer(torch.full((1, 2), rank + 1.0, dtype=torch.bfloat16)).sum().backward()
            sync.finish(is_last=False)
            sync.close()
            return layer.weight._skyctl_master.grad

        for gradient in together(2, act):
            assert gradient.dtype is torch.float32
            assert gradient.tolist() == [[3.0, 3.0]]


def test_sparse_and_complex_gradients_are_refused() -> None:
    with pytest.raises(WorkloadError, match=r"Sequential: 0 is an embedding with sparse=True") as caught:
        check_summable([nn.Sequential(nn.Embedding(4, 2, sparse=True))])
    assert "sparse=False" in str(caught.value.hint)
    odd = nn.Module()
    odd.weight = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(WorkloadError, match="weight is complex64"):
        check_summable([odd])
