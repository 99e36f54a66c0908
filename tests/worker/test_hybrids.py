"""Pipelines with cuts of their own train as one device does, and any form goes on from any other's files."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.helpers.hybrid_plans import Stages, hybrid_plan
from tests.helpers.orders import sent_orders, with_fields, with_sync
from tests.run.test_rank_spec import make_plan
from tests.worker import reference
from tests.worker.test_data_parallel import RANGED, SCHEDULER
from tests.worker.test_resume import BATCH_NORM
from tests.worker.workloads import DROPOUT, RAISING, VALIDATION, edit_workload

from skyctl.checkpoint.node import safetensors
from skyctl.records.cluster import Cluster, Node
from skyctl.records.plan import Plan
from skyctl.run.rank_spec import check_plan_fits, rank_specs
from skyctl.workload.recipe import Recipe
from skyctl.workload.workload_spec import WorkloadSpec

Workloads = Callable[..., dict[str, Any]]
Pipelines = Sequence[tuple[Stages, int]]
LAYERS, MICROBATCHES = 7, 6
NAMES = tuple("abcdefgh")
A, B, C, D, *_ = DEVICES = [f"{name}/cpu:0" for name in NAMES]
CLUSTER = Cluster(name="c", nodes=tuple(Node(name=name, transport="local", threads=1) for name in NAMES))
CROSSED: Pipelines = [([(A, 0, 3), (B, 3, 7)], 4), ([(C, 0, 5), (D, 5, 7)], 2)]
"""Three groups: of layers 0–3, 3–5 and 5–7."""
FORMS: dict[str, Pipelines] = {
    "one device": [([(A, 0, 7)], 6)],
    "pipeline": [([(A, 0, 2), (B, 2, 5), (C, 5, 7)], 6)],
    "data": [([(A, 0, 7)], 2), ([(B, 0, 7)], 3), ([(C, 0, 7)], 1)],
    "hybrid": CROSSED,
}
HYBRIDS: dict[str, Pipelines] = {
    "crossed": CROSSED,
    "the shorter one first": [([(A, 0, 6), (B, 6, 7)], 1), ([(C, 0, 2), (D, 2, 7)], 5)],
    "beside one device": [([(A, 0, 3), (B, 3, 7)], 4), ([(C, 0, 7)], 2)],
    "one device first": [([(A, 0, 7)], 1), ([(B, 0, 2), (C, 2, 3), (D, 3, 7)], 5)],
    "the same cuts": [([(A, 0, 3), (B, 3, 7)], 3), ([(C, 0, 3), (D, 3, 7)], 3)],
    "three": [([(A, 0, 7)], 2), ([(B, 0, 4), (C, 4, 7)], 3), ([(D, 0, 7)], 1)],
}


def make_hybrid(pipelines: Pipelines, star: bool = False) -> Plan:
    """The plan, of layers about which it says nothing."""
    base = json.loads(make_plan(*DEVICES).to_json())
    layer = base["problem"]["layers"][0]
    base["problem"]["layers"] = [{**layer, "name": f"l{i}"} for i in range(pipelines[0][0][-1][2])]
    base["problem"]["microbatches"] = sum(microbatches for _, microbatches in pipelines)
    return Plan.model_validate(hybrid_plan(base, pipelines, star))


def rank_orders(pipelines: Pipelines, spec: Any, steps: int, star: bool = False, **options: Any) -> list[Any]:
    """The orders that the launcher would send to the ranks; one pipeline has nothing to sum."""
    plan = make_hybrid(pipelines, star)
    check_plan_fits(plan, CLUSTER)
    recipe = Recipe.from_dict({"total_steps": steps, **options.pop("recipe", {})})
    encrypt, checkpoint = options.pop("encrypt", False), options.pop("checkpoint", None)
    specs = rank_specs(
        plan, CLUSTER, run_id="test", steps=steps,
        workload=dict.fromkeys(NAMES, WorkloadSpec.from_dict(spec)),
        addresses=dict.fromkeys(NAMES, "127.0.0.1"), recipe=recipe, trace=options.pop("trace", False),
        weights=options.pop("weights", False),
    )  # fmt: skip
    orders = [with_fields(order, **options) for order in sent_orders(specs, encrypt=encrypt)]
    if checkpoint is None:
        return orders
    return [with_fields(order, checkpoint={**checkpoint, "writes": order.pipeline == 0}) for order in orders]


def train(pool: Any, pipelines: Pipelines, spec: Any, steps: int, **options: Any) -> Any:
    done = pool.run(rank_orders(pipelines, spec, steps, **options))
    assert not done.errors, (pipelines, done.errors)
    return done


@pytest.mark.parametrize("name", HYBRIDS)
def test_losses_are_one_devices(workload: Workloads, pool: Any, name: str) -> None:
    """With the norm clipped, the first pipeline validating, and eight samples in microbatches of 2 and 1."""
    spec = edit_workload(workload(batch_size=8), text=VALIDATION)
    recipe = Recipe(clip_norm=0.5, total_steps=12, validate_every=5, validate_batches=2)
    expected = reference.train(spec, MICROBATCHES, recipe)
    for star in (False, True):
        done = train(pool, HYBRIDS[name], spec, 12, star=star, recipe=recipe.to_dict())
        assert done.losses == pytest.approx(expected.losses, rel=1e-5)
        assert done.validation == pytest.approx(expected.validation, rel=1e-5)
        norms = [event["grad_norm"] for event in done.steps[0]]
        assert norms == pytest.approx(expected.norms, rel=1e-5)
        again = train(pool, HYBRIDS[name], spec, 12, star=star, recipe=recipe.to_dict(), encrypt=star)
        assert again.losses == done.losses, "to the last bit"


@pytest.mark.parametrize(
    ("edits", "text", "more"),
    [([DROPOUT, *RANGED], SCHEDULER, {}), ([DROPOUT], SCHEDULER, {"dtype": "bfloat16"})],
    ids=["dropout, a scheduler, data by range", "in bfloat16"],
)
def test_whatever_a_workload_has(
    workload: Workloads, pool: Any, edits: list[tuple[str, str]], text: str, more: dict[str, str]
) -> None:
    spec = edit_workload(workload(batch_size=8), *edits, text=text) | more
    alone = train(pool, FORMS["one device"], spec, 8)
    done = train(pool, CROSSED, spec, 8)
    assert done.losses == pytest.approx(alone.losses, rel=1e-5)


@pytest.mark.parametrize(("name", "close"), [("bfloat16", 5e-3), ("int8", 2e-2), ("powersgd:1", 0.1)])
def test_sums_may_be_rounded(workload: Workloads, pool: Any, name: str, close: float) -> None:
    spec = workload(batch_size=8)
    alone = train(pool, FORMS["one device"], spec, 8)
    done = pool.run([with_sync(order, format=name) for order in rank_orders(CROSSED, spec, 8)])
    assert not done.errors, done.errors
    assert done.losses != alone.losses
    assert done.losses == pytest.approx(alone.losses, rel=close)


@pytest.mark.parametrize("schedule", ["sequential", "gpipe"])
def test_under_other_schedules(workload: Workloads, pool: Any, schedule: str) -> None:
    spec = workload(batch_size=8)
    alone = train(pool, FORMS["one device"], spec, 8)
    orders = []
    for order in rank_orders(CROSSED, spec, 8):
        first, stop = order.microbatch_range
        in_flight = 1 if schedule == "sequential" else stop - first
        orders.append(replace(order, schedule=schedule, in_flight=in_flight))
    done = pool.run(orders)
    assert not done.errors, done.errors
    assert done.losses == pytest.approx(alone.losses, rel=1e-5)


def test_running_figures_are_averaged_group_by_group(workload: Workloads, pool: Any) -> None:
    """A layer of a norm lies in the middle group, held by the first one's second stage."""
    norm = (BATCH_NORM[0], "nn.BatchNorm1d(5), nn.GELU(), Head()")
    spec = edit_workload(workload(batch_size=8), norm)
    weights_of_plans = []
    for pipelines in (CROSSED, [([(A, 0, 7)], 4), ([(B, 0, 7)], 2)]):
        done = train(pool, pipelines, spec, 1, weights=True)
        weights: dict[str, torch.Tensor] = {}
        for result in done.results.values():
            if result["weights"]:
                weights |= safetensors.load(Path(result["weights"]))
        weights_of_plans.append(weights)
    crossed, aligned = weights_of_plans
    assert crossed.keys() == aligned.keys()
    assert int(crossed["4.num_batches_tracked"]) == MICROBATCHES
    for name in crossed:
        torch.testing.assert_close(crossed[name], aligned[name], rtol=1e-5, atol=1e-7)


def test_all_ranks_end_with_the_step_that_the_first_one_is_told_to(workload: Workloads, pool: Any) -> None:
    def stop(pool: Any, rank: int, event: dict[str, Any]) -> None:
        if rank == 0 and event["event"] == "step" and event["step"] == 3:
            pool.processes[0].send({"op": "stop"})

    outcome = pool.run(rank_orders(CROSSED, workload(batch_size=8), 500), on_event=stop)
    assert not outcome.errors, outcome.errors
    ended = {result["steps"] for result in outcome.results.values()}
    assert len(ended) == 1
    assert 4 <= ended.pop() < 500


def test_a_rank_that_fails_is_the_cause(workload: Workloads, pool: Any) -> None:
    """Those that sum with it, or are its neighbours, have lost it; all end."""
    outcome = pool.run(rank_orders(CROSSED, workload(batch_size=8, replace=RAISING), 9))
    assert sorted(outcome.errors) == [0, 1, 2, 3]
    messages = {rank: error["message"] for rank, error in outcome.errors.items()}
    assert messages.pop(1) == "step 1, forward of microbatch 2: ValueError: bad sample"
    assert {outcome.errors[rank]["type"] for rank in messages} == {"PeerLostError"}, messages


PAIRS = [(first, other) for first in FORMS for other in FORMS if first != other]
OFTEN = [("one device", "hybrid"), ("hybrid", "pipeline")]


@pytest.mark.parametrize(
    ("before", "after"),
    [pytest.param(*p, marks=() if p in OFTEN else pytest.mark.matrix) for p in PAIRS],
    ids=[f"{first} → {other}" for first, other in PAIRS],
)
@pytest.mark.parametrize("encrypt", [False, True], ids=["plain", "encrypted"])
def test_any_form_goes_on_from_any_others_checkpoint(
    workload: Workloads, pool: Any, tmp_path: Path, before: str, after: str, encrypt: bool
) -> None:
    spec = edit_workload(workload(batch_size=8), DROPOUT, text=SCHEDULER)
    recipe = Recipe(total_steps=9)
    whole = train(pool, FORMS["one device"], spec, 9).losses
    folder = tmp_path / "kept"
    kept = {"every": 5, "folder": str(folder), "keep": 2, "at_end": False, "attempt": 1}
    words = {"recipe": recipe.to_dict(), "encrypt": encrypt}
    first = train(pool, FORMS[before], spec, 9, checkpoint=kept, **words)
    assert first.losses == pytest.approx(whole, rel=1e-5)
    files = {
        str(layer): shard["sha256"]
        for events in first.checkpoints.values()
        for layer, shard in events[0]["layers"].items()
    }
    assert sorted(map(int, files)) == list(range(LAYERS))
    resume = {"step": 5, "folder": str(folder), "layers": files}
    second = train(pool, FORMS[after], spec, 9, resume=resume, **words)
    assert second.losses == pytest.approx(whole[5:], rel=1e-5)


@pytest.fixture(scope="module")
def eight(driver: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Eight processes."""
    pool = driver.Pool(8, tmp_path_factory.mktemp("eight"))
    try:
        yield pool
    finally:
        pool.close()


def _random_pipelines(chance: random.Random) -> Pipelines:
    """Two to eight devices in one pipeline or more, each with one to seven microbatches."""
    devices = chance.sample(DEVICES, chance.randint(2, len(DEVICES)))
    pipelines = []
    while devices:
        stages = chance.randint(1, min(len(devices), LAYERS))
        cuts = [0, *sorted(chance.sample(range(1, LAYERS), stages - 1)), LAYERS]
        row = [(devices.pop(), start, stop) for start, stop in itertools.pairwise(cuts)]
        pipelines.append((row, chance.randint(1, 7)))
    return pipelines


@pytest.mark.slow
@pytest.mark.parametrize("combinations", [12, pytest.param(150, marks=pytest.mark.matrix)])
def test_no_combination_hangs(workload: Workloads, eight: Any, combinations: int) -> None:
    """Random pipelines, whose losses are one device's; a third of them are told to end early."""
    source = workload(batch_size=1)
    chance = random.Random(combinations)
    expected: dict[int, list[float]] = {}
    for number in range(combinations):
        pipelines = _random_pipelines(chance)
        microbatches = sum(count for _, count in pipelines)
        spec = {**source, "batch_size": microbatches}
        losses = expected.setdefault(microbatches, [])
        if not losses:
            losses += reference.train(spec, microbatches, Recipe(clip_norm=0.5, total_steps=4)).losses
        stops, star = chance.random() < 0.3, chance.random() < 0.5

        def end_early(pool: Any, rank: int, event: dict[str, Any], stops: bool = stops) -> None:
            if stops and rank == 0 and event["event"] == "step" and event["step"] == 0:
                pool.processes[0].send({"op": "stop"})

        orders = rank_orders(pipelines, spec, 4, star, recipe={"clip_norm": 0.5})
        outcome = eight.run(orders, on_event=end_early)
        assert not outcome.errors, (number, pipelines, outcome.errors)
        assert len({result["steps"] for result in outcome.results.values()}) == 1
        assert outcome.losses == pytest.approx(losses[: len(outcome.losses)], rel=1e-5), (number, pipelines)
        assert stops or len(outcome.losses) == 4
