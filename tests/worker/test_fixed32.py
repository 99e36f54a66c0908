"""Gradients summed as integers: the same bits whatever the plan, within a stated bound, nothing lost."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.worker.sums import RouteEdges, connected, places, ring, star, together
from tests.worker.test_data_parallel import LAYERS, MICROBATCHES
from tests.worker.test_gradient_sync import packed_trees
from tests.worker.test_resume import BATCH_NORM, NORM, keeping, resuming
from tests.worker.workloads import DROPOUT, VALIDATION, edit_workload
from torch import nn

from skyctl.checkpoint.node import safetensors
from skyctl.errors import RunError
from skyctl.worker.rank_events import SumSizes
from skyctl.worker.rank_order import SumGroupOrder, SumOrder
from skyctl.worker.sum_helper import SumHelper
from skyctl.worker.sums.gradient_sync import GradientSync
from skyctl.worker.sums.route_sum import RouteSum
from skyctl.worker.sums.sum_layout import make_layout
from skyctl.worker.sums.sum_messages import GRADIENTS
from skyctl.worker.sums.sum_work import SumWork
from skyctl.worker.sums.summed_gradients import IntegerGradients, TrainedParameter
from skyctl.workload.recipe import Recipe

Workloads = Callable[..., dict[str, Any]]
FIXED32 = {"format": "fixed32"}
RECIPE = Recipe(clip_norm=0.5, lr_schedule="cosine", warmup_steps=2, validate_every=3, total_steps=6)
SPIKE = [
    ("        ids = torch.randint(0, 11,", "        ids = torch.randint(0, 10,"),
    ("        yield ids, ids[:, 0]", "        ids[:, 0] = 10 if (step := step + 1) == 4 else ids[:, 0]\n"
     "        yield ids, ids[:, 0].clone()"),
    ("    while True:", "    step = 0\n    while True:"),
    ("    return nn.functional.cross_entropy(outputs, targets)",
     "    factor = torch.where((targets == 10).all(), 1000.0, 1.0)\n"
     "    return nn.functional.cross_entropy(outputs, targets) * factor"),
    ("        return self.table(ids), ids", "        return self.table(ids.add_(1).remainder_(11)), ids"),
]  # fmt: skip
"""The fourth batch's gradients are about 1000 times as large; the first layer overwrites its inputs."""


def gradients_of(numels: list[int], microbatches: int) -> tuple[list[nn.Parameter], IntegerGradients]:
    parameters = [nn.Parameter(torch.zeros(numel)) for numel in numels]
    return parameters, IntegerGradients([TrainedParameter(0, p) for p in parameters], microbatches)


def add_up(parameters: list[nn.Parameter], gradients: IntegerGradients, given: list[Any]) -> list[Any]:
    """The integers of one pass; ``given``: by microbatch, the gradient of each parameter."""
    for microbatch, values in enumerate(given):
        for parameter, value in zip(parameters, values, strict=True):
            parameter.grad = None if value is None else value.clone()
        if microbatch + 1 < len(given):
            gradients.end_microbatch()
    return [gradients.take(place) for place in range(len(parameters))]


@pytest.mark.parametrize(
    ("microbatches", "vectors"),
    [(1, 10_000), (16, 1_000), pytest.param(16, 10_000, marks=pytest.mark.matrix)],
)
def test_vectors_are_within_the_stated_bound(microbatches: int, vectors: int) -> None:
    """Of each exponent from -30 to 30, against float64; with the result's own rounding apart."""
    r, generator = random.Random(microbatches), torch.Generator().manual_seed(microbatches)
    numels = [r.randint(1, 20) for _ in range(vectors)]
    scales = [2.0 ** r.randint(-30, 30) for _ in numels]
    given = [
        [torch.randn(n, generator=generator) * s for n, s in zip(numels, scales, strict=True)]
        for _ in range(microbatches)
    ]
    parameters, gradients = gradients_of(numels, microbatches)
    add_up(parameters, gradients, given)
    assert gradients.overflows(), "there are no exponents yet"
    gradients.repeat(gradients.codes())
    sums = [integers.double() for integers in add_up(parameters, gradients, given)]
    exponents = list(gradients.exponents.exponents or [])
    assert len(exponents) == vectors
    assert not gradients.overflows()
    gradients.finish(gradients.codes())
    worst = 0.0
    for place, exponent in enumerate(exponents):
        exact = torch.stack([values[place].double() for values in given]).sum(0)
        bound = microbatches * 2.0 ** (exponent - 1)
        error = (sums[place] * 2.0**exponent - exact).abs().max().item()
        worst = max(worst, error / bound)
        assert error <= bound
        assert sums[place].abs().max().item() < 2**31
        gradient = parameters[place].grad
        assert gradient is not None
        assert torch.equal(gradient, (sums[place] * 2.0**exponent).float()), "rounded once"
    print(f"M = {microbatches}: the largest error is {worst:.3f} of M * 2**(e - 1)")


def test_twenty_orders_of_adding_and_arriving_give_the_same_bits() -> None:
    """Of the same twelve microbatches, three a rank; float32 sums of the same differ among themselves."""
    generator = torch.Generator().manual_seed(0)
    given = [[torch.randn(3000, generator=generator) * 10.0 ** (i % 3)] for i in range(12)]
    sums_by_format: dict[str, set[bytes]] = {"fixed32": set(), "float32": set()}
    for order in range(20):
        r = random.Random(order)
        shuffled = r.sample(given, len(given))
        waits_s = [r.uniform(0.0, 0.02) for _ in range(4)]
        children = r.sample([1, 2, 3], 3)
        routes = [(1.0, 0, [(child, 0) for child in children], [(0, child) for child in children])]
        for name, seen in sums_by_format.items():
            seen.add(summed_in_order(name, routes, shuffled, waits_s))
    assert len(sums_by_format["fixed32"]) == 1
    assert len(sums_by_format["float32"]) > 1


def summed_in_order(
    name: str, routes: list[RouteEdges], given: list[list[torch.Tensor]], waits_s: list[float]
) -> bytes:
    """The bytes of the sum that all four ranks end with."""
    layout = make_layout([[3000]], [1.0], 700)
    with connected(routes, 4) as ends:

        def act(rank: int) -> bytes:
            part = RouteSum(
                0,
                places(routes, rank),
                ends[rank],
            )
            mine = given[3 * rank : 3 * rank + 3]
            own = mine[0][0] + mine[1][0] + mine[2][0]
            if name == "fixed32":
                parameters, gradients = gradients_of([3000], 12)
                gradients.exponents.exponents = [-15]
                [own] = add_up(parameters, gradients, mine)
                assert not gradients.overflows()
            time.sleep(waits_s[rank])
            sum_work = SumWork(layout, 0, kind=GRADIENTS, format=name)
            part.begin(sum_work)
            sum_work.add_bucket([own])
            sum_work.wait()
            part.close()
            return bytes(own.view(torch.uint8).tolist())

        [total] = set(together(4, act))
        assert isinstance(total, bytes), total
        return total


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_losses_norms_and_weights_are_the_same_bits_whatever_the_plan(
    dtype: str, workload: Workloads, pool: Any, driver: ModuleType
) -> None:
    """Three sets of routes, three vectors of shares; eight samples in microbatches of 2 2 1 1 1 1."""
    spec = edit_workload(workload(batch_size=8), DROPOUT, text=VALIDATION) | {"dtype": dtype}
    options = {"recipe": RECIPE.to_dict(), "weights": True}
    seen, runs = set(), 0
    for routes in (ring(3), star(3, root=1), packed_trees()):
        for shares in ([2, 2, 2], [4, 1, 1], [1, 2, 3]):
            orders = driver.side_by_side(spec, LAYERS, shares, routes, 6, sync=FIXED32, **options)
            done = pool.run(orders)
            assert not done.errors, (shares, done.errors)
            assert [event.get("repeats", 0) for event in done.steps[0]] == [1, 0, 0, 0, 0, 0]
            norms = [event["grad_norm"] for event in done.steps[0]]
            weights = safetensors.load(Path(done.results[0]["weights"]))
            bits = b"".join(
                bytes(w.view(torch.uint8).reshape(-1).tolist()) for _, w in sorted(weights.items())
            )
            seen.add((*done.losses, *norms, bits))
            runs += 1
    assert (runs, len(seen)) == (9, 1)
    [plain] = [
        pool.run(driver.side_by_side(spec, LAYERS, [2, 2, 2], ring(3), 6, **options)).losses for _ in "x"
    ]
    assert plain == pytest.approx(done.losses, rel=1e-5 if dtype == "float32" else 1e-3)


def test_a_step_that_overflows_is_made_again_and_loses_nothing(
    workload: Workloads, pool: Any, driver: ModuleType, tmp_path: Path
) -> None:
    """Dropout, a batch norm, a buffer that counts forwards, inputs that a layer overwrites; then resumed."""
    spec = edit_workload(workload(batch_size=8), DROPOUT, *SPIKE, BATCH_NORM, text=NORM)
    outcomes = {}
    for name in ("float32", "fixed32"):
        orders = driver.side_by_side(
            spec,
            LAYERS,
            [1, 3, 2],
            star(3),
            8,
            sync={"format": name},
            weights=True,
            checkpoint=keeping(tmp_path / name),
        )
        outcomes[name] = pool.run(orders)
        assert not outcomes[name].errors, outcomes[name].errors
    plain, fixed = outcomes["float32"], outcomes["fixed32"]
    for rank in range(3):
        assert [event.get("repeats", 0) for event in plain.steps[rank]] == [0] * 8
        assert [event.get("repeats", 0) for event in fixed.steps[rank]] == [1, 0, 0, 1, 0, 0, 0, 0]
    assert plain.losses[3] > 100 * plain.losses[2]
    assert fixed.losses == pytest.approx(plain.losses, rel=1e-5)
    weights = [safetensors.load(Path(done.results[0]["weights"])) for done in (plain, fixed)]
    assert int(weights[1]["4.norm.num_batches_tracked"]) == MICROBATCHES * 8
    for key, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][key], tensor, rtol=1e-4, atol=1e-6)

    resume = resuming(fixed, tmp_path / "fixed32", step=3)
    for name in ("float32", "fixed32"):
        sync = {"format": name}
        orders = driver.side_by_side(spec, LAYERS, [1, 3, 2], star(3), 8, sync=sync, resume=resume)
        rest = outcomes[name] = pool.run(orders)
        assert not rest.errors, rest.errors
    repeats = [event.get("repeats", 0) for event in outcomes["fixed32"].steps[0]]
    assert repeats == [1, 0, 0, 0, 0], "exponents are found anew"
    assert outcomes["fixed32"].losses == pytest.approx(outcomes["float32"].losses, rel=1e-5)


def test_a_repeated_sum_is_that_of_a_step_which_never_overflowed() -> None:
    """With the exponents that were found, from the first."""
    generator = torch.Generator().manual_seed(1)
    given = [[torch.randn(50, generator=generator), torch.randn(9, generator=generator)] for _ in range(4)]
    larger = [[first * 1000.0, second] for first, second in given]
    parameters, gradients = gradients_of([50, 9], 4)
    add_up(parameters, gradients, given)
    gradients.repeat(gradients.codes())
    add_up(parameters, gradients, given)
    gradients.finish(gradients.codes())
    before = list(gradients.exponents.exponents or [])
    gradients.restart()
    add_up(parameters, gradients, larger)
    assert gradients.overflows()
    gradients.repeat(gradients.codes())
    wider = list(gradients.exponents.exponents or [])
    assert (wider[0] > before[0], wider[1] == before[1]) == (True, True)
    add_up(parameters, gradients, larger)
    assert not gradients.overflows()
    gradients.finish(gradients.codes())
    others, again = gradients_of([50, 9], 4)
    again.exponents.exponents = wider
    add_up(others, again, larger)
    again.finish(again.codes())
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(parameters, others, strict=True))


def test_what_is_none_zero_or_no_number() -> None:
    """Both end with the same: None, zeros, and NaN where one rank's gradient held a NaN or infinity."""
    with connected(ring(2), 2) as ends:

        def act(rank: int) -> list[Any]:
            layers = [nn.Linear(4, 1, bias=False) for _ in range(5)]
            layers[0].weight = nn.Parameter(torch.zeros(1, 4, dtype=torch.float64))
            layers.append(nn.ParameterList([torch.zeros(0)]))
            group = SumGroupOrder(0, 0, tuple(places(ring(2), rank)), start=0, stop=6)
            sync = GradientSync(
                layers, 0, [group], ends[rank], format="fixed32", chunk_bytes=8, share=0.5, microbatches=2
            )
            passes = 0
            for step in range(2):
                sync.start_step()
                repeats = True
                while repeats:
                    passes += 1
                    sync.begin(step)
                    layers[0].weight.grad = torch.full((1, 4), 0.1 * (rank + 1), dtype=torch.float64)
                    layers[1].weight.grad = torch.full((1, 4), [torch.nan, 1.0][rank])
                    layers[2].weight.grad = torch.tensor([[1.0, 2.0, torch.inf, 3.0]]) if rank else None
                    layers[3].weight.grad = torch.zeros(1, 4)
                    layers[5][0].grad = torch.zeros(0)
                    repeats = sync.finish(is_last=False).repeats
            sync.close()
            return [passes, *(layer.weight.grad for layer in layers[:5])]

        outcomes = together(2, act)
    for outcome in outcomes:
        assert not isinstance(outcome, Exception), outcome
        passes, plain, nan, infinite, zero, none = outcome
        assert passes == 4, "what only one rank knows to be no number does not fit on the other"
        assert plain.dtype is torch.float64
        torch.testing.assert_close(plain, torch.full((1, 4), 0.3, dtype=torch.float64), rtol=1e-6, atol=0)
        assert bool(nan.isnan().all() and infinite.isnan().all())
        assert zero.tolist() == [[0.0] * 4]
        assert none is None
    assert torch.equal(outcomes[0][1], outcomes[1][1])


def test_several_groups_can_not_make_a_step_again_together() -> None:
    group = SumGroupOrder(0, 0, tuple(places(star(1), 0)), start=0, stop=1)
    with pytest.raises(RunError, match="fixed32 sums one group of layers, and this rank is in 2"):
        GradientSync([nn.Linear(1, 1)], 0, [group, group], {}, format="fixed32", share=1.0)


def test_a_helper_repeats_a_sum_as_replicas_do() -> None:
    """Rank 2 is the root, and has nothing of its own; the second of three steps overflows."""
    routes: list[RouteEdges] = [(1.0, 2, [(0, 2), (1, 2)], [(2, 0), (2, 1)])]
    with connected(routes, 3) as ends:

        def group(rank: int) -> SumGroupOrder:
            own_places = places(routes, rank)
            return SumGroupOrder(0, 0, tuple(own_places), start=0, stop=1, agreement=own_places[0])

        def help_to_sum() -> list[bool]:
            sync = SumOrder("fixed32", 16, (group(2),))
            helper = SumHelper(sync, SumSizes((12,), parameters=2, figures=0), ends[2])
            endings = [helper.sum_gradients(step) for step in range(3)]
            helper.close()
            return endings

        def hold(rank: int) -> list[Any]:
            layer = nn.Linear(3, 3)
            sync = GradientSync(
                [layer], 0, [group(rank)], ends[rank],
                format="fixed32", chunk_bytes=16, share=0.5, microbatches=2,
            )  # fmt: skip
            steps = []
            for step in range(3):
                sync.start_step()
                passes, repeats = 0, True
                while repeats:
                    sync.begin(step)
                    layer.weight.grad = torch.full((3, 3), (rank + 1.0) * (1000.0 if step == 1 else 1.0))
                    layer.bias.grad = torch.ones(3)
                    report, passes = sync.finish(is_last=step == 2), passes + 1
                    repeats = report.repeats
                steps.append((passes, report.is_last, layer.weight.grad))
            sync.close()
            return steps

        *replicas, helped = together(3, lambda rank: help_to_sum() if rank == 2 else hold(rank))
    assert helped == [False, False, True]
    for steps in replicas:
        assert [(passes, is_last) for passes, is_last, _ in steps] == [(2, False), (2, False), (1, True)]
        assert [gradient.unique().tolist() for *_, gradient in steps] == [[3.0], [3000.0], [3.0]]
