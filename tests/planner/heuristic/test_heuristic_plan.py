"""The heuristic strategy: quality, what it must never do, determinism; and the batch arithmetic under it."""

from __future__ import annotations

import time
from itertools import pairwise

import numpy as np
import pytest
from tests.planner.planner_problems import brute_force, layer, problem, random_problem

from skyctl.errors import InfeasibleError, UndecidedError
from skyctl.planner.cost_model import CostModel, StageAssignment
from skyctl.planner.evaluation import bottleneck_s, step_lower_bound_s
from skyctl.planner.heuristic.balance import even_placement
from skyctl.planner.heuristic.heuristic_plan import heuristic_placement
from skyctl.planner.heuristic.plan_batch import PlanBatch
from skyctl.planner.heuristic.quick_beam import QuickBeam
from skyctl.planner.heuristic.simulated_annealing import (
    MoveSampler,
    anneal,
    best_simulated,
    counted_progress,
    improve_until,
)
from skyctl.planner.pipeline_depth import choose_execution
from skyctl.records.problem import Device, Link, Problem

SCHEDULES = ("sequential", "gpipe", "1f1b", "eager-1f1b")


def covers(model, placement):
    stops = [0, *(stage.stop for stage in placement)]
    return (
        [stage.start for stage in placement] == stops[:-1]
        and stops[-1] == model.layers
        and all(stage.start < stage.stop for stage in placement)
        and len({stage.device for stage in placement}) == len(placement)
    )


def sites(mean_s=1.0, high=4.0, per_site=3, layers=40, microbatches=24, **more):
    """Three sites: fast links inside; between them a message takes half the mean stage's time."""
    r = np.random.default_rng(0)
    count = 3 * per_site
    speeds = 1 / r.uniform(1, high, count)
    speeds *= layers / speeds.sum() / mean_s
    size = 0.5 * mean_s * 6.25e6
    ids = [f"s{i // per_site}n{i % per_site}/cpu:0" for i in range(count)]
    near = {"latency_s": 2e-4, "bandwidth_bytes_per_s": 1.25e8}
    far = {"latency_s": 2e-2, "bandwidth_bytes_per_s": 6.25e6}
    return Problem(
        layers=tuple(layer(i, 1.0, 0.0, output=size) for i in range(layers)),
        devices=tuple(
            Device(id=name, flops_per_s=float(speed), memory_bytes=None)
            for name, speed in zip(ids, speeds, strict=True)
        ),
        links=tuple(
            Link(source=a, target=b, **(near if a[:2] == b[:2] else far)) for a in ids for b in ids if a != b
        ),
        microbatches=microbatches,
        **more,
    )


@pytest.mark.parametrize("seed", range(60))
def test_allowed_and_never_worse_than_even(seed):
    given = random_problem(seed, schedule=SCHEDULES[seed % 4])
    model = CostModel(given)
    try:
        placement = heuristic_placement(model)
    except UndecidedError:
        return
    except InfeasibleError:
        if given.schedule != "eager-1f1b":
            assert brute_force(given) is None
        return
    assert covers(model, placement)
    assert model.is_allowed(placement)
    plain = even_placement(model)
    if model.is_allowed(plain):
        assert choose_execution(model, placement)[0] <= choose_execution(model, plain)[0]


@pytest.mark.parametrize("seed", range(40))
def test_small_problems_are_close_to_the_optimum(seed):
    given = random_problem(1000 + seed)
    best = brute_force(given)
    if best is None:
        with pytest.raises(InfeasibleError):
            heuristic_placement(CostModel(given))
        return
    model = CostModel(given)
    assert best * (1 - 1e-9) <= choose_execution(model, heuristic_placement(model))[0] <= best * 1.02


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_deterministic(schedule):
    given = random_problem(7, schedule=schedule, objective="iteration")
    assert heuristic_placement(CostModel(given)) == heuristic_placement(CostModel(given))


@pytest.mark.parametrize("mean_s", [1.0, 0.1])
@pytest.mark.parametrize("high", [1.5, 4.0])
def test_sites_are_visited_once_each(mean_s, high):
    model = CostModel(sites(mean_s, high))
    placement = heuristic_placement(model)
    order = [model.ids[stage.device][:2] for stage in placement]
    assert sum(a != b for a, b in pairwise(order)) == 2


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("objective", ["iteration", "bottleneck"])
def test_improve_never_returns_worse(schedule, objective):
    for seed in range(6):
        given = random_problem(seed, schedule=schedule, objective=objective)
        model = CostModel(given)
        plain = even_placement(model)
        if not model.is_allowed(plain):
            continue
        better = improve_until(model, plain, time.perf_counter() + 0.05, seed)
        assert covers(model, better)
        assert model.is_allowed(better)
        assert choose_execution(model, better)[0] <= choose_execution(model, plain)[0]


def test_improve_with_no_time_left_returns_what_it_was_given():
    model = CostModel(sites())
    plain = even_placement(model)
    assert improve_until(model, plain, time.perf_counter() - 1) == plain


def test_improve_of_one_device_or_one_layer():
    for given in (problem(speeds=(1.0,)), problem(flops=(1.0,))):
        model = CostModel(given)
        plain = even_placement(model)
        assert improve_until(model, plain, time.perf_counter() + 0.01) == plain


def test_annealing_of_a_number_of_steps_is_deterministic_and_improves():
    model = CostModel(sites())
    batch, plain = PlanBatch(model), even_placement(model)
    placements = [
        best_simulated(model, anneal(batch, [plain], counted_progress(60), seed=3)) for _ in range(2)
    ]
    assert placements[0] == placements[1]
    assert choose_execution(model, placements[0])[0] < 0.9 * choose_execution(model, plain)[0]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_random_moves_keep_plans_whole_and_batch_costs_are_the_models(schedule):
    for seed in range(25):
        given = random_problem(seed, schedule=schedule)
        model = CostModel(given)
        batch, moves = PlanBatch(model), MoveSampler(np.random.default_rng(seed), model.max_stages)
        order, sizes = batch.encode([even_placement(model)] * 8)
        for _ in range(15):
            order, sizes = moves.propose(order, sizes)
        cost = batch.cost_s(order, sizes)
        played = batch.simulated_cost_s(order, sizes, np.full(8, np.inf))
        for i in range(8):
            placement = batch.decode(order[:, i], sizes[:, i])
            assert covers(model, placement)
            assert len(placement) <= model.max_stages
            assert model.is_allowed(placement) == bool(np.isfinite(cost[i]))
            if not np.isfinite(cost[i]):
                continue
            value = choose_execution(model, placement)[0]
            exact = not model.by_iteration or (schedule in {"sequential", "gpipe"} and not given.shared)
            if exact:
                assert cost[i] == pytest.approx(value, rel=1e-12)
            if schedule == "1f1b" and model.by_iteration:
                assert step_lower_bound_s(model, placement) * (1 - 1e-12) <= cost[i] <= value * (1 + 1e-12)
                assert cost[i] * (1 - 1e-12) <= played[i] <= value * (1 + 1e-12)
                if not given.shared:
                    assert played[i] == pytest.approx(value, rel=1e-12)


def test_plays_of_many_stages_are_the_simulators():
    model = CostModel(sites(per_site=6, microbatches=10))
    batch, moves = PlanBatch(model), MoveSampler(np.random.default_rng(1), model.max_stages)
    order, sizes = batch.encode([even_placement(model)] * 200)
    for _ in range(30):
        order, sizes = moves.propose(order, sizes)
    for few in (slice(0, 20), slice(0, 200)):
        played = batch.simulated_cost_s(order[:, few], sizes[:, few], np.full(len(order[0, few]), np.inf))
        for i in range(0, played.size, 9):
            placement = batch.decode(order[:, i], sizes[:, i])
            assert played[i] == pytest.approx(choose_execution(model, placement)[0], rel=1e-12)


def test_encode_and_decode():
    model = CostModel(problem(flops=(1.0,) * 9, speeds=(1.0,) * 4))
    placement = (StageAssignment(2, 0, 4), StageAssignment(0, 4, 5), StageAssignment(3, 5, 9))
    order, sizes = PlanBatch(model).encode([placement])
    assert order[:, 0].tolist() == [3, 0, 2, 1]
    assert sizes[:, 0].tolist() == [4, 1, 4, 0]
    assert PlanBatch(model).decode(order[:, 0], sizes[:, 0]) == placement


@pytest.mark.parametrize("seed", range(60))
def test_a_wide_beam_is_exact(seed):
    given = random_problem(seed, objective="bottleneck", receive_window=0)
    best = brute_force(given)
    placement = QuickBeam(CostModel(given)).best(64, 60, 1e-9)
    if best is None:
        assert placement is None
    else:
        assert placement is not None
        assert bottleneck_s(CostModel(given), placement) == pytest.approx(best, rel=1e-6)


def test_many_identical_devices_with_tight_memory():
    given = problem(flops=(1.0, 2.0) * 20, speeds=(1.0,) * 6 + (2.0,) * 4, memory=[4.0] * 10)
    model = CostModel(given)
    placement = heuristic_placement(model)
    assert model.is_allowed(placement)
    assert len(placement) == 10


def test_pins_hold():
    given = sites(first_stage=("s1n1/cpu:0",), last_stage=("s2n0/cpu:0", "s0n0/cpu:0"))
    model = CostModel(given)
    placement = heuristic_placement(model)
    assert model.ids[placement[0].device] == "s1n1/cpu:0"
    assert model.ids[placement[-1].device] in {"s2n0/cpu:0", "s0n0/cpu:0"}
