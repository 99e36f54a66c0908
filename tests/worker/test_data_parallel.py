"""One to four replicas with unequal shares train as one device does, whatever a workload has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.worker import reference
from tests.worker.sums import ring, star
from tests.worker.test_encrypted import tls
from tests.worker.test_resume import BATCH_NORM
from tests.worker.test_shared_parameters import TIES
from tests.worker.workloads import DROPOUT, edit_workload

from skyctl.checkpoint.node import safetensors
from skyctl.workload.recipe import Recipe, microbatch_sizes
from skyctl.workload.workload import load_workload
from skyctl.workload.workload_spec import WorkloadSpec

Workloads = Callable[..., dict[str, Any]]
LAYERS, MICROBATCHES = 7, 6
SHARES = ([6], [5, 1], [1, 3, 2], [2, 1, 1, 2])
FROZEN = ("        self.table = nn.Embedding(11, 8)\n",
          "        self.table = nn.Embedding(11, 8)\n        self.requires_grad_(False)\n")  # fmt: skip
RANGED = [
    ("def data(batch_size, seed):", "def data(batch_size, seed, start, stop):"),
    ("        yield ids, ids[:, 0]", "        yield ids[start:stop], ids[start:stop, 0]"),
]
SCHEDULER = """
def lr_scheduler(optimizer, steps):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=steps)
"""


def train(pool: Any, driver: ModuleType, spec: Any, shares: list[int], steps: int, **options: Any) -> Any:
    count = len(shares)
    routes = star(count, root=count - 1) if count == 3 else ring(count)
    done = pool.run(driver.side_by_side(spec, LAYERS, shares, routes, steps, **options))
    assert not done.errors, (shares, done.errors)
    return done


@pytest.mark.slow
def test_thirty_steps_of_one_to_four_replicas_and_of_a_pipeline(
    workload: Workloads, pool: Any, driver: ModuleType
) -> None:
    """Eight samples in six microbatches (2 2 1 1 1 1), layers with tuples, without parameters, one frozen."""
    spec = edit_workload(workload(batch_size=8), FROZEN)
    recipe = Recipe(clip_norm=0.5, total_steps=30)
    expected = reference.train(spec, MICROBATCHES, recipe).losses
    assert expected[-1] < expected[0]
    options = {"recipe": recipe.to_dict()}
    all_losses = [train(pool, driver, spec, shares, 30, **options).losses for shares in SHARES]
    cut = driver.orders(spec, [0, 2, 3, 7], MICROBATCHES, "1f1b", 30, **options)  # the second: a ReLU
    all_losses.append(pool.run(cut).losses)
    for losses in all_losses:
        assert losses == pytest.approx(expected, rel=1e-5)
    for shares, losses in zip(SHARES[1:], all_losses[1:], strict=False):
        assert train(pool, driver, spec, shares, 30, **options).losses == losses, "to the last bit"
    encrypted = train(pool, driver, spec, SHARES[-1], 30, **options, tls=tls(True))
    assert encrypted.losses == all_losses[3]


@pytest.mark.parametrize(
    ("edits", "text", "more"),
    [
        (TIES, "", {}),
        ([DROPOUT, *RANGED], SCHEDULER, {}),
        ([*TIES, DROPOUT], SCHEDULER, {"dtype": "bfloat16"}),
    ],
    ids=["tied", "dropout, a scheduler, data by range", "all of it in bfloat16"],
)
def test_as_on_one_device(
    workload: Workloads,
    pool: Any,
    driver: ModuleType,
    edits: list[tuple[str, str]],
    text: str,
    more: dict[str, str],
) -> None:
    spec = edit_workload(workload(batch_size=8), *edits, text=text) | more
    alone = train(pool, driver, spec, [MICROBATCHES], 8, recompute=True)
    if not text:
        expected = reference.train(spec, MICROBATCHES, Recipe(total_steps=8)).losses
        assert alone.losses == pytest.approx(expected, rel=1e-5)
    for shares in SHARES[1:]:
        done = train(pool, driver, spec, shares, 8, recompute=True)
        assert done.losses == pytest.approx(alone.losses, rel=1e-5), shares
    for name, close in (("bfloat16", 1e-2), ("int8", 2e-2)):
        rounded = train(pool, driver, spec, SHARES[-1], 8, sync={"format": name})
        assert rounded.losses != alone.losses
        assert rounded.losses == pytest.approx(alone.losses, rel=close)


def test_running_figures_are_the_mean_of_the_replicas(
    workload: Workloads, pool: Any, driver: ModuleType
) -> None:
    norm = (BATCH_NORM[0], "nn.BatchNorm1d(5), nn.GELU(), Head()")
    spec = edit_workload(workload(batch_size=8), norm)
    shares = SHARES[2]
    done = train(pool, driver, spec, shares, 1, weights=True)
    loaded = load_workload(WorkloadSpec.from_dict(spec))
    inputs, _ = next(loaded.batches())
    assert isinstance(inputs, torch.Tensor)
    parts = list(inputs.split(microbatch_sizes(8, MICROBATCHES)))
    expected = torch.zeros(2, 5)
    for share in shares:
        layers = loaded.build(0, LAYERS, "cpu")
        for _ in range(share):
            value = parts.pop(0)
            for layer in layers:
                value = layer(value)
        expected += torch.stack([layers[4].running_mean, layers[4].running_var]) * share / MICROBATCHES
    weights = safetensors.load(Path(done.results[0]["weights"]))
    torch.testing.assert_close(torch.stack([weights["4.running_mean"], weights["4.running_var"]]), expected)
    assert int(weights["4.num_batches_tracked"]) == MICROBATCHES
