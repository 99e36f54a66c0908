"""Ranks that train on the toy accelerator, against the same ranks on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.attack.rank_forms import FORMS, orders
from tests.worker.sums import ring
from tests.worker.test_resume import keeping, resuming
from tests.worker.workloads import DROPOUT, LAYERS, VALIDATION, edit_workload

from skyctl.checkpoint.node import safetensors
from skyctl.worker.rank_order import AnyRankOrder, HelperOrder
from skyctl.workload.recipe import Recipe

Workloads = Callable[..., dict[str, Any]]
STEPS = 6
RECIPE = Recipe(clip_norm=0.5, lr_schedule="cosine", warmup_steps=2, validate_every=3, total_steps=STEPS)
CUTS = ([0, 7], [0, 3, 7], [0, 2, 5, 7])


def on_toys(told: list[AnyRankOrder]) -> list[AnyRankOrder]:
    """The same ranks, each on one of the two devices of its process."""
    return [
        one if isinstance(one, HelperOrder) else replace(one, device=f"toy:{one.world.rank % 2}")
        for one in told
    ]


def trained(pool: Any, told: list[AnyRankOrder]) -> Any:
    done = pool.run(told)
    assert not done.errors, done.errors
    return done


@pytest.mark.parametrize(("form", "encrypt"), [*((form, False) for form in FORMS), ("hybrid", True)])
def test_every_form_trains_as_on_the_cpu(form: str, encrypt: bool, workload: Workloads, pool: Any) -> None:
    told = orders(form, workload(), STEPS, encrypt=encrypt)
    here, there = trained(pool, told), trained(pool, on_toys(told))
    assert here.steps.keys() == there.steps.keys()
    if form != "staleness":  # depends on when workers push
        assert there.losses == pytest.approx(here.losses, rel=1e-5)


@pytest.mark.parametrize("encoded", ["float32", "bfloat16", "fixed32", "int8", "powersgd:2"])
def test_gradients_are_summed_in_every_format(
    encoded: str,
    workload: Workloads,
    pool: Any,
    driver: ModuleType,
) -> None:
    sync = {"format": encoded, "uncompressed_steps": 1}
    told = driver.side_by_side(workload(), LAYERS, [2, 1, 1], ring(3), STEPS, sync=sync)
    here, there = trained(pool, told), trained(pool, on_toys(told))
    assert there.losses == pytest.approx(here.losses, rel=1e-4)


@pytest.mark.parametrize("options", [{"recompute": True}, {"schedule": "zero-bubble"}, {"dtype": "bfloat16"}])
def test_a_pipeline_does_not_depend_on_its_cut(
    options: dict[str, Any],
    workload: Workloads,
    pool: Any,
    driver: ModuleType,
) -> None:
    """With dropout: what layers draw comes from the device's own generator, seeded for each layer."""
    options = {"schedule": "1f1b", **options}
    spec = edit_workload(workload(), DROPOUT, text=VALIDATION) | {"dtype": options.pop("dtype", "float32")}
    schedule, recipe = options.pop("schedule"), RECIPE.to_dict()
    found = [
        trained(pool, on_toys(driver.orders(spec, cuts, 4, schedule, STEPS, recipe=recipe, **options)))
        for cuts in CUTS
    ]
    for one in found:
        assert one.losses == pytest.approx(found[0].losses, rel=1e-5)
        assert one.validation == pytest.approx(found[0].validation, rel=1e-5)
        assert all(result["peak_memory_bytes"] > 0 for result in one.results.values())


def test_the_first_weights_are_those_of_the_cpu(
    workload: Workloads,
    pool: Any,
    driver: ModuleType,
) -> None:
    still = ("torch.optim.SGD(parameters, lr=0.1, momentum=0.9)", "torch.optim.SGD(parameters, lr=0.0)")
    spec = edit_workload(workload("sgd"), still)
    told = driver.orders(spec, [0, 3, 7], 4, "1f1b", 1, weights=True)
    weights = [
        [
            safetensors.load(Path(result["weights"]))
            for _, result in sorted(trained(pool, one).results.items())
        ]
        for one in (told, on_toys(told))
    ]
    for here, there in zip(*weights, strict=True):
        assert here.keys() == there.keys()
        assert all(torch.equal(here[name], there[name]) for name in here)


@pytest.mark.parametrize(("begins_on", "goes_on_on"), [("toy", "toy"), ("toy", "cpu"), ("cpu", "toy")])
def test_a_checkpoint_goes_on_on_another_device(
    begins_on: str, goes_on_on: str, workload: Workloads, pool: Any, driver: ModuleType, tmp_path: Path
) -> None:
    spec, folder = workload(), tmp_path / "r"
    told = driver.orders(spec, [0, 3, 7], 4, "1f1b", STEPS, checkpoint=keeping(folder))
    whole = trained(pool, on_toys(told) if begins_on == "toy" else told)
    resume = resuming(whole, folder, 3)
    rest = driver.orders(spec, [0, 2, 5, 7], 4, "1f1b", STEPS, resume=resume)
    done = trained(pool, on_toys(rest) if goes_on_on == "toy" else rest)
    assert done.losses == pytest.approx(whole.losses[3:], rel=1e-5)


def test_memory_that_does_not_last_is_told_by_name(
    workload: Workloads,
    driver: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TOY_MEMORY_BYTES", "4000")
    ranks = driver.Pool(1, tmp_path)
    try:
        (error,) = ranks.run(on_toys(driver.orders(workload(), [0, 7], 4, "1f1b", 1))).errors.values()
    finally:
        ranks.close()
    assert "out of memory on toy:0" in error["message"]
