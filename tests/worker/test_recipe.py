"""Clipping, the learning rate's course, dropout, validation and bfloat16: as in one process, however cut."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.helpers.rounding import rounding
from tests.worker import reference
from tests.worker.workloads import DROPOUT, VALIDATION, edit_workload

from skyctl.checkpoint.node import safetensors
from skyctl.workload.recipe import Recipe
from skyctl.workload.workload import load_workload
from skyctl.workload.workload_spec import WorkloadSpec

Workloads = Callable[..., dict[str, Any]]
STEPS = 5
CLOSE = rounding(35 * STEPS)
"""A step's gradients are sums over seven samples of five tokens."""
PLANS = [([0, 7], "1f1b"), ([0, 3, 7], "gpipe"), ([0, 2, 5, 7], "1f1b")]
CHANCE = (
    "        return self.norm(x + skip) *",
    "        import random\n"
    "        x = x if random.random() < 0.5 or not self.training else x * 2\n"
    "        return self.norm(x + skip) *",
)
MORE_DROPOUT = ("nn.Linear(8, 8), nn.GELU(), Head()", "nn.Dropout(0.3), nn.Dropout(0.3), Head()")


def run(
    pool: Any, driver: ModuleType, spec: dict[str, Any], plan: Any, recipe: Recipe, **options: Any
) -> Any:
    cuts, schedule = plan
    schedule = options.pop("schedule", schedule)
    outcome = pool.run(
        driver.orders(spec, cuts, 4, schedule, recipe.total_steps, recipe=recipe.to_dict(), **options)
    )
    assert not outcome.errors, (plan, outcome.errors)
    return outcome


@pytest.mark.parametrize("frozen", [False, True])
def test_clipping_is_by_the_norm_of_the_whole_model(
    frozen: bool, workload: Workloads, pool: Any, driver: ModuleType
) -> None:
    spec = workload("sgd")
    if frozen:  # one stage of the last plan then trains nothing
        edit_workload(
            spec,
            ("    return nn.Sequential(", "    layers = nn.Sequential("),
            (
                "Head())\n",
                "Head())\n    for p in layers[:2].parameters(): p.requires_grad_(False)\n    return layers\n",
            ),
        )
    recipe = Recipe(clip_norm=0.4, total_steps=STEPS)
    expected = reference.train(spec, 4, recipe)
    assert min(expected.norms) < 0.4 < max(expected.norms), "both sides of the limit"
    for plan in PLANS:
        outcome = run(pool, driver, spec, plan, recipe, weights=True)
        for rank, events in outcome.steps.items():
            norms = [event["grad_norm"] for event in events]
            assert norms == pytest.approx(expected.norms, rel=CLOSE), (plan, rank)
            for event in events:
                parts = event["compute_s"] + event["transfer_s"] + event["idle_s"]
                assert parts == pytest.approx(event["iteration_s"])
        assert outcome.losses == pytest.approx(expected.losses, rel=CLOSE), plan
        for rank in outcome.results:
            for name, tensor in safetensors.load(Path(outcome.results[rank]["weights"])).items():
                torch.testing.assert_close(tensor, expected.weights[name], rtol=CLOSE, atol=CLOSE / 10)


def test_a_trace_shows_clipping_and_the_waiting_for_it(
    workload: Workloads, pool: Any, driver: ModuleType
) -> None:
    recipe = Recipe(clip_norm=1e-3, total_steps=2)
    outcome = run(pool, driver, workload("sgd"), PLANS[1], recipe, trace=True)
    for rank, waits in ((0, 1), (1, 1)):
        steps = json.loads(Path(outcome.results[rank]["trace"]).read_text())["steps"]
        kinds = [span[0] for span in steps[-1]["spans"]]
        assert kinds.count("C") == 2, "the norm, and the scaling"
        after = kinds[kinds.index("C") + 1 :]
        assert after.count("transfer") == waits
        assert after[-1] == "O"


def test_a_norm_that_is_not_finite_is_an_error_with_the_step(
    workload: Workloads, pool: Any, driver: ModuleType
) -> None:
    bad = (
        "return x.relu(), ids, skip",
        "self.calls = getattr(self, 'calls', 0) + (not hasattr(x, 'fake_mode'))\n"
        "        return (x if self.calls < 9 else x / 0).relu(), ids, skip",
    )
    spec = workload("sgd", replace=bad)
    recipe = Recipe(clip_norm=1.0, total_steps=STEPS).to_dict()
    outcome = pool.run(driver.orders(spec, [0, 3, 7], 4, "1f1b", STEPS, recipe=recipe))
    messages = [event["message"] for event in outcome.errors.values() if event["type"] == "RunError"]
    assert messages
    for message in messages:
        assert message.startswith("step 2, the gradients' norm: the gradients of layers ")
        assert "are not finite (their norm is nan)" in message


@pytest.mark.parametrize("name", ["linear", "cosine", "constant"])
def test_the_learning_rate_takes_its_course(
    name: str, workload: Workloads, pool: Any, driver: ModuleType
) -> None:
    floor = 0.0 if name == "constant" else 0.002
    recipe = Recipe(lr_schedule=name, warmup_steps=2, min_learning_rate=floor, total_steps=6)
    spec = workload("adamw")
    expected = reference.train(spec, 4, recipe)
    outcome = run(pool, driver, spec, PLANS[1], recipe)
    for events in outcome.steps.values():
        assert [event["learning_rate"] for event in events] == pytest.approx(expected.rates)
    assert expected.rates[:3] == pytest.approx([0.01 / 3, 0.02 / 3, 0.01])
    assert outcome.losses == pytest.approx(expected.losses, rel=1e-5)


def test_a_floor_above_the_rate_is_refused(workload: Workloads, pool: Any, driver: ModuleType) -> None:
    recipe = Recipe(lr_schedule="linear", min_learning_rate=0.5, total_steps=3).to_dict()
    outcome = pool.run(driver.orders(workload("adamw"), [0, 7], 4, "1f1b", 3, recipe=recipe))
    assert "0.5 is more than the optimizer's own learning rate, 0.01" in outcome.errors[0]["message"]


@pytest.mark.parametrize("how", [{}, {"recompute": True}, {"schedule": "zero-bubble", "weights_behind": 1}])
def test_dropout_is_the_same_under_every_plan(
    how: dict[str, Any], workload: Workloads, pool: Any, driver: ModuleType
) -> None:
    spec = edit_workload(workload("sgd"), DROPOUT, MORE_DROPOUT, CHANCE)
    recipe = Recipe(total_steps=STEPS)
    expected = reference.train(spec, 4, recipe)
    still = reference.train(edit_workload(workload("sgd")), 4, recipe)
    assert abs(expected.losses[0] - still.losses[0]) > 1e-3, "it drops something"
    edit_workload(spec, DROPOUT, MORE_DROPOUT, CHANCE)
    for plan in PLANS:
        outcome = run(pool, driver, spec, plan, recipe, **how)
        assert outcome.losses == pytest.approx(expected.losses, rel=1e-5), plan


@pytest.mark.parametrize("number", [2, 9])
def test_validation_is_the_mean_over_held_out_batches(
    number: int, workload: Workloads, pool: Any, driver: ModuleType
) -> None:
    """The third of four batches is too small and left out; nine are asked for, three there are."""
    spec = edit_workload(workload("sgd"), DROPOUT, MORE_DROPOUT, text=VALIDATION)
    recipe = Recipe(validate_every=2, validate_batches=number, total_steps=STEPS)
    expected = reference.train(spec, 4, recipe)
    assert sorted(expected.validation) == [1, 3, 4]
    for plan in PLANS:
        outcome = run(pool, driver, spec, plan, recipe)
        assert outcome.validation == pytest.approx(expected.validation, rel=1e-5), plan
        assert outcome.losses == pytest.approx(expected.losses, rel=1e-5), plan
        last = max(outcome.steps)
        assert [e["step"] for e in outcome.steps[last] if e["validates"]] == [1, 3, 4]


METRICS = """
def metrics(outputs, targets):
    assert not outputs.requires_grad and outputs.dtype == torch.float32
    right = (outputs.argmax(1) == targets).float()
    odd = torch.tensor(float("nan")) if len(targets) < 2 else right[0]
    found = {"accuracy": right.mean(), "loss/again": loss(outputs, targets)}
    return {**found, "odd": odd, "samples": len(targets)}
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_metrics_are_the_means_over_held_out_samples(
    dtype: str, workload: Workloads, pool: Any, driver: ModuleType
) -> None:
    """Of microbatches of 2, 2, 2 and 1 samples."""
    spec = edit_workload(workload("sgd"), DROPOUT, text=VALIDATION + METRICS) | {"dtype": dtype}
    recipe = Recipe(validate_every=3, validate_batches=2, total_steps=3)
    accuracies = []
    for plan in PLANS:
        outcome = run(pool, driver, spec, plan, recipe)
        (event,) = [event for _, event in outcome.order if event["event"] == "validation"]
        assert event["metrics"]["loss/again"] == pytest.approx(event["loss"], rel=rounding(7))
        assert event["metrics"]["accuracy"] * 14 == pytest.approx(round(event["metrics"]["accuracy"] * 14))
        assert event["metrics"]["odd"] is None
        assert event["metrics"]["samples"] == pytest.approx((6 * 2 + 1) / 7)
        accuracies.append(event["metrics"]["accuracy"])
    assert len(set(accuracies)) == 1


def test_wrong_metrics_end_the_run_with_their_line(
    workload: Workloads, pool: Any, driver: ModuleType
) -> None:
    spec = edit_workload(
        workload("sgd"), text=VALIDATION + "\ndef metrics(outputs, targets):\n    return {'a': outputs[99]}\n"
    )
    recipe = Recipe(validate_every=1, total_steps=2).to_dict()
    outcome = pool.run(driver.orders(spec, [0, 3, 7], 4, "1f1b", 2, recipe=recipe))
    assert "metrics() failed: IndexError" in outcome.errors[1]["message"]
    assert outcome.errors[1]["message"].startswith("train.py, line ")


@pytest.mark.parametrize("how", [{}, {"recompute": True}, {"schedule": "zero-bubble", "weights_behind": 1}])
def test_all_together_in_bfloat16_equals_one_process_to_the_last_bit(
    how: dict[str, Any], workload: Workloads, pool: Any, driver: ModuleType
) -> None:
    spec = edit_workload(workload("adamw"), DROPOUT, text=VALIDATION) | {"dtype": "bfloat16"}
    recipe = Recipe(lr_schedule="cosine", warmup_steps=2, validate_every=3, total_steps=STEPS)
    expected = reference.train(spec, 4, recipe)
    for plan in PLANS:
        outcome = run(pool, driver, spec, plan, recipe, weights=True, **how)
        assert outcome.losses == expected.losses, plan
        assert outcome.validation == pytest.approx(expected.validation, rel=1e-12), plan
        for rank in outcome.results:
            for name, tensor in safetensors.load(Path(outcome.results[rank]["weights"])).items():
                assert tensor.dtype == torch.float32
                assert torch.equal(tensor, expected.weights[name]), name


def test_bfloat16_learns_as_float32_does(pool: Any, driver: ModuleType) -> None:
    source = "gpt:layers=2,hidden=32,heads=2,context=16"
    losses = {}
    for dtype in ("float32", "bfloat16"):
        spec = WorkloadSpec(source=source, batch_size=8, seed=1, dtype=dtype, learning_rate=0.01)
        layers = load_workload(spec).layers
        recipe = Recipe(clip_norm=1.0, total_steps=30)
        losses[dtype] = run(pool, driver, spec.to_dict(), ([0, 3, layers], "1f1b"), recipe).losses
    assert losses["float32"][-1] < losses["float32"][0] - 1.5
    for part in (slice(10), slice(10, 20), slice(20, 30)):  # a step's own is its batch's chance
        means = {dtype: fmean(own[part]) for dtype, own in losses.items()}
        assert means["bfloat16"] == pytest.approx(means["float32"], rel=rounding(1, torch.bfloat16))
    assert not math.isclose(losses["bfloat16"][-1], losses["float32"][-1], rel_tol=1e-6)
