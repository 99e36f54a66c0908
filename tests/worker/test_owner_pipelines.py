"""Owners with several machines: their pipelines make rounds as one process does; stops, and going on."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.hybrid_plans import Stages, hybrid_plan
from tests.helpers.orders import sent_orders, with_fields
from tests.run.test_rank_spec import make_plan
from tests.worker import round_reference
from tests.worker.test_hybrids import CLUSTER, DEVICES, NAMES
from tests.worker.test_local_rounds import AFFORDS, EXAMPLE, OWN_DATA, affords, is_as
from tests.worker.test_shared_parameters import TIES
from tests.worker.workloads import DROPOUT, edit_workload

from skyctl.checkpoint.node import safetensors
from skyctl.records.plan import Plan
from skyctl.run.rank_spec import check_plan_fits, rank_specs
from skyctl.workload.recipe import Recipe
from skyctl.workload.workload_spec import WorkloadSpec

Workloads = Callable[..., dict[str, Any]]
MICROBATCHES = 3
A, B, C, D, *_ = DEVICES
CUT: dict[str, Stages] = {"a": [(A, 0, 7)], "b": [(B, 0, 7)], "c+d": [(C, 0, 3), (D, 3, 7)]}
WHOLE: dict[str, Stages] = {"a": [(A, 0, 7)], "b": [(B, 0, 7)], "c+d": [(D, 0, 7)]}
BOTH_CUT: dict[str, Stages] = {"a+b": [(A, 0, 5), (B, 5, 7)], "c+d": [(C, 0, 3), (D, 3, 7)]}
STEPS = [5, 2, 3]


def rank_orders(
    owners: dict[str, Stages],
    steps: Sequence[int],
    spec: Any,
    rounds: int,
    rhythm: dict[str, Any],
    **options: Any,
) -> list[dict[str, Any]]:
    """The orders that the launcher would send to the ranks."""
    base = json.loads(make_plan(*DEVICES).to_json())
    layer = base["problem"]["layers"][0]
    base["problem"]["layers"] = [{**layer, "name": f"l{i}"} for i in range(7)]
    base["problem"]["microbatches"] = MICROBATCHES
    document = hybrid_plan(
        base, [(stages, MICROBATCHES) for stages in owners.values()], star=options.pop("star", False)
    )
    named = [owner.split("+") for owner in owners]
    document["problem"] |= {"version": 11, "rhythm": {"local_steps": list(steps), **rhythm}, "owners": named}
    document["problem"]["ties"] = [{"layers": layers, "bytes": 4.0} for layers in options.pop("ties", ())]
    document["sync"]["of"] = "weights"
    if len(owners) == 1:
        document["sync"] = None
    for pipeline, count in zip(document["pipelines"], steps, strict=True):
        pipeline["local_steps"] = count
    plan = Plan.model_validate(document)
    check_plan_fits(plan, CLUSTER)
    recipe = Recipe.from_dict({"total_steps": rounds, **options.pop("recipe", {})})
    checkpoint = options.pop("checkpoint", None)
    ranks = rank_specs(
        plan, CLUSTER, run_id="test", steps=rounds,
        workload=dict.fromkeys(NAMES, WorkloadSpec.from_dict(spec)),
        addresses=dict.fromkeys(NAMES, "127.0.0.1"), recipe=recipe, weights=options.pop("weights", False),
    )  # fmt: skip
    orders = [with_fields(order, **options) for order in sent_orders(ranks)]
    if checkpoint is None:
        return orders
    return [with_fields(order, checkpoint={**checkpoint, "writes": order.pipeline == 0}) for order in orders]


def of_owners(done: Any, last_ranks: Sequence[int]) -> Any:
    """Only the events of these ranks, which know the losses."""
    done.steps = {rank: done.steps[rank] for rank in last_ranks}
    return done


@pytest.mark.parametrize("star", [False, True])
@pytest.mark.parametrize("rhythm", [{}, {"prox_mu": 0.5, "clients_per_round": 2}], ids=["FedAvg", "FedProx"])
def test_a_pipeline_is_an_owner(workload: Workloads, pool: Any, rhythm: dict[str, Any], star: bool) -> None:
    spec = edit_workload(workload("sgd", batch_size=6), *OWN_DATA, DROPOUT, text=EXAMPLE + AFFORDS)
    expected = round_reference.train(
        spec, MICROBATCHES, STEPS, 5, owners=list(CUT), mu=rhythm.get("prox_mu", 0.0),
        clients=rhythm.get("clients_per_round"), step_budget=affords, clip_norm=0.5,
    )  # fmt: skip
    recipe = Recipe(clip_norm=0.5, total_steps=5).to_dict()
    done = pool.run(rank_orders(CUT, STEPS, spec, 5, rhythm, star=star, weights=True, recipe=recipe))
    assert not done.errors, done.errors
    is_as(of_owners(done, [0, 1, 3]), expected)


def test_another_plan_of_the_same_owners_goes_on_from_any_round(
    workload: Workloads, pool: Any, tmp_path: Path
) -> None:
    """Batches of a round do not depend on what came of earlier ones."""
    spec = edit_workload(workload("adamw", batch_size=6), *OWN_DATA, text=EXAMPLE + AFFORDS)
    rhythm = {"clients_per_round": 2}
    keeps = {"folder": str(tmp_path / "r"), "every": 2, "keep": 9, "at_end": True, "attempt": 1}
    whole = pool.run(rank_orders(CUT, STEPS, spec, 6, rhythm, checkpoint=keeps, weights=True))
    assert not whole.errors, whole.errors
    expected = of_owners(whole, [0, 1, 3]).losses
    for owners, last in ((WHOLE, [0, 1, 2]), (CUT, [0, 1, 3])):
        for step in (2, 4):
            resume = {"step": step, "folder": str(tmp_path / "r")}
            rest = pool.run(rank_orders(owners, STEPS, spec, 6, rhythm, resume=resume, weights=True))
            assert not rest.errors, rest.errors
            assert of_owners(rest, last).losses == pytest.approx(expected[step:], rel=1e-5)
    state = safetensors.load(next((tmp_path / "r").rglob("layer-*.safetensors")))
    assert not [name for name in state if "exp_avg" in name], "what an owner's optimizer has seen is not kept"


@pytest.mark.parametrize(
    ("owners", "steps"), [(WHOLE, STEPS), (CUT, STEPS), (BOTH_CUT, [2, 3])], ids=["whole", "cut", "both cut"]
)
def test_all_end_with_the_same_round(
    workload: Workloads, pool: Any, tmp_path: Path, owners: dict[str, Stages], steps: list[int]
) -> None:
    """Told to stop, whoever has a part in the round; the checkpoint after it can be gone on from."""
    text = EXAMPLE + AFFORDS.replace('"b": round % 3', '"b": round % 3, "a+b": 2')
    spec = edit_workload(workload("sgd", batch_size=6), *OWN_DATA, text=text)
    keeps = {"folder": str(tmp_path / "r"), "every": 0, "keep": 2, "at_end": True, "attempt": 1}
    asked: list[int] = []

    def stop(pool: Any, rank: int, event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["step"] == 3 and not asked:
            asked.append(rank)
            pool.processes[0].send({"op": "stop"})

    orders = rank_orders(owners, steps, spec, 100_000, {"clients_per_round": 1}, checkpoint=keeps)
    outcome = pool.run(orders, stop)
    assert not outcome.errors, outcome.errors
    (ended,) = {result["steps"] for result in outcome.results.values()}
    assert {event["step"] for events in outcome.checkpoints.values() for event in events} == {ended}
    sketches = [event["sketches"] for events in outcome.checkpoints.values() for event in events]
    seen: dict[str, Any] = {}
    for of_rank in sketches:
        for layer, sketch in of_rank.items():
            assert seen.setdefault(layer, sketch) == sketch, "replicas have the same weights"


@pytest.mark.parametrize("owners", [CUT, {"c+d": CUT["c+d"]}], ids=["three", "alone"])
def test_all_end_where_no_work_counts(workload: Workloads, pool: Any, owners: dict[str, Stages]) -> None:
    """Each round's work comes too late, and is dropped; told to stop, the run ends nevertheless."""
    spec = edit_workload(workload("sgd", batch_size=6), *OWN_DATA, text=EXAMPLE)
    asked: list[int] = []

    def stop(pool: Any, rank: int, event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["step"] == 3 and not asked:
            asked.append(rank)
            pool.processes[0].send({"op": "stop"})

    rhythm = {"round_deadline_s": 1e-6, "drop_stragglers": True}
    outcome = pool.run(rank_orders(owners, [9] * len(owners), spec, 3000, rhythm), stop)
    assert not outcome.errors, outcome.errors
    (ended,) = {result["steps"] for result in outcome.results.values()}
    assert ended < 3000


def test_machines_of_one_owner_that_afford_different_numbers_are_named(
    workload: Workloads, pool: Any, tmp_path: Path
) -> None:
    """Soon, and with both numbers: one of them would wait for the other's steps for ever."""
    text = EXAMPLE + AFFORDS.replace('"c+d": 1 if round != 2 else 0', '"c+d": 3 if round < 2 else HERE')
    spec = edit_workload(workload("sgd", batch_size=6), *OWN_DATA, text=text.replace("HERE", "3"))
    other = tmp_path / "other" / "train.py"
    other.parent.mkdir()
    other.write_text(Path(spec["path"]).read_text().replace("else 3", "else 1"))
    orders = rank_orders(CUT, STEPS, spec, 5, {})
    orders[3] = replace(orders[3], workload=replace(orders[3].workload, path=str(other)))
    done = pool.run(orders)
    assert set(done.errors) == {0, 1, 2, 3}, done.errors
    error = done.errors[3]
    assert error["type"] == "WorkloadError", error
    assert "owner c+d affords different numbers of local steps in round 2" in error["message"]
    assert "local_steps() comes to 1 here, and to 3 on its first machine" in error["message"]
    assert {done.errors[rank]["type"] for rank in range(3)} == {"PeerLostError"}
    assert [event["local_steps"] for event in done.steps[3]] == [3, 3]


@pytest.mark.parametrize(("owners", "last"), [(WHOLE, [0, 1, 2]), (CUT, [0, 1, 3])], ids=["whole", "cut"])
def test_an_owner_stops_at_its_deadline_and_its_work_counts(
    workload: Workloads, pool: Any, owners: dict[str, Stages], last: list[int]
) -> None:
    spec = edit_workload(workload("sgd", batch_size=6), *OWN_DATA, text=EXAMPLE)
    rhythm = {"round_deadline_s": 1e-6}
    done = of_owners(pool.run(rank_orders(owners, [9, 9, 9], spec, 3, rhythm, weights=True)), last)
    expected = round_reference.train(
        spec, MICROBATCHES, [9, 9, 9], 3, owners=list(owners), step_budget=lambda _owner, _round: 1
    )
    is_as(done, expected)
    dropped = pool.run(
        rank_orders(owners, [9, 9, 9], spec, 3, {**rhythm, "drop_stragglers": True}, weights=True)
    )
    assert not dropped.errors, dropped.errors
    assert [event["samples"] for event in dropped.steps[0]] == [0, 0, 0]
    first = [event["own_loss"] for event in dropped.steps[0]]
    undisturbed = [event["own_loss"] for event in done.steps[0]]
    assert first[0] == undisturbed[0]
    assert first[1:] != undisturbed[1:], "nothing was averaged: each round begins where the first one did"


@pytest.mark.parametrize(("limits_s", "steps_made"), [((1e-6, 1e6), 1), ((1e6, 1e-6), 9)])
def test_the_first_stage_of_an_owner_says_when_its_time_is_over(
    workload: Workloads, pool: Any, limits_s: tuple[float, float], steps_made: int
) -> None:
    """Stages that each went by their own clock would wait for each other's steps."""
    spec = edit_workload(workload("sgd", batch_size=6), *OWN_DATA, text=EXAMPLE)
    orders = rank_orders(CUT, [2, 2, 9], spec, 2, {"round_deadline_s": 1e6})
    for rank, limit_s in enumerate(limits_s, 2):
        orders[rank] = replace(orders[rank], rounds=replace(orders[rank].rounds, deadline_s=limit_s))
    done = pool.run(orders)
    assert not done.errors, done.errors
    counted = [[event["local_steps"] for event in done.steps[rank]] for rank in range(4)]
    assert counted == [[2, 2], [2, 2], [steps_made, steps_made], [steps_made, steps_made]]


def test_one_owner_alone_with_tied_layers_in_two_stages(workload: Workloads, pool: Any) -> None:
    """Nobody to average with: its tied parameters are summed in each of its steps, its optimizer is reset."""
    spec = edit_workload(workload("sgd", batch_size=6), *OWN_DATA, *TIES, text=EXAMPLE)
    alone: dict[str, Stages] = {"c+d": [(C, 0, 3), (D, 3, 7)]}
    expected = round_reference.train(spec, MICROBATCHES, [3], 3, owners=["c+d"], mu=0.2)
    done = pool.run(rank_orders(alone, [3], spec, 3, {"prox_mu": 0.2}, weights=True, ties=[[0, 4, 6]]))
    assert not done.errors, done.errors
    assert of_owners(done, [1]).losses == pytest.approx(expected.losses, rel=1e-5)
