"""Prices by place: never above what all subsets find, and as far as the solver's own claims."""

import math
import random
import time

import numpy as np
import pytest
from tests.planner.planner_problems import brute_force, layer, problem, random_problem

from skyctl.planner.api import plan, verify
from skyctl.planner.bottleneck.layer_prices import LayerPrices, price_bound_s, volume_bound_s
from skyctl.planner.bottleneck.reach_table import ReachTable
from skyctl.planner.cost_model import CostModel
from skyctl.planner.verification import convex_solvers, lower_bound, proof_by_prices, proof_by_subsets
from skyctl.planner.verification.problem_data import ProblemData
from skyctl.records.problem import Device, Problem

SCHEDULES = ("1f1b", "1f1b", "gpipe", "sequential", "eager-1f1b")


def by_place(seed, devices, layers, schedule="1f1b", window=0, room=(1.1, 2.2)):
    """Activations that bind, the more the nearer a stage is to the first."""
    r = random.Random(seed)
    parts = tuple(
        layer(
            i, r.uniform(1, 9), r.uniform(1, 3), r.uniform(0.2, 1.5), r.uniform(0.1, 1),
            r.choice([0.0, r.uniform(0, 3)]),
        )
        for i in range(layers)
    )  # fmt: skip
    mean = sum(x.state_bytes + x.activation_bytes * min(16, devices) / 2 for x in parts) / devices
    return Problem(
        layers=parts,
        devices=tuple(
            Device(id=f"n{d}/cpu:0", flops_per_s=r.uniform(1, 4), memory_bytes=mean * r.uniform(*room))
            for d in range(devices)
        ),
        microbatches=16,
        schedule=schedule,
        receive_window=window,
        objective="bottleneck",
    )


def small(seed):
    """Every quantity that matters, memory that binds on half."""
    r = random.Random(seed)
    p = random_problem(seed, objective="bottleneck", schedule=r.choice(SCHEDULES), linked=0, most_layers=6)
    if seed % 2 == 0:
        return p
    layers = (x.model_copy(update={"activation_bytes": 3 * x.activation_bytes}) for x in p.layers)
    devices = (
        d.model_copy(update={"memory_bytes": (d.memory_bytes or 60) * r.uniform(0.5, 1.2)}) for d in p.devices
    )
    return p.model_copy(update={"layers": tuple(layers), "devices": tuple(devices)})


@pytest.mark.parametrize("first", range(0, 500, 50))
def test_nothing_above_the_optimum_is_proved(first):
    """500 problems against every order and cut; most optima are proved as well."""
    proved = fit = 0
    for seed in range(first, first + 50):
        p = small(seed)
        best, facts = brute_force(p), ProblemData(p)
        if best is None:
            continue
        fit += 1
        proved += proof_by_prices.prove_by_stage_prices(facts, best * (1 - 1e-9)).holds is True
        for share in (1 + 1e-9, 1 + 1e-6, 1.01, 1.5):
            assert proof_by_prices.prove_by_stage_prices(facts, best * share).holds is None, (seed, share)
    assert proved >= 0.75 * fit


@pytest.mark.parametrize("window", [0, 1])
@pytest.mark.parametrize("seed", range(6))
def test_between_other_prices_and_all_subsets(seed, window):
    p = by_place(seed, 7, 18, window=window)
    facts = ProblemData(p)
    low, high = 0.1, 1e3
    while high - low > 1e-9 * low:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if proof_by_subsets.prove(facts, middle).holds else (low, middle)
    for share in (1 + 1e-9, 1.001, 1.1):
        assert proof_by_prices.prove_by_stage_prices(facts, high * share).holds is not True
    for share in (0.7, 0.8, 0.9, 0.95, 0.99, 1 - 1e-6):
        if proof_by_prices.prove_by_layer_prices(facts, low * share).holds:
            assert proof_by_prices.prove_by_stage_prices(facts, low * share).holds is True


def test_places_know_what_prices_do_not():
    """With the least number in flight everywhere it fits; with what each place has it never does."""
    p = by_place(5, 14, 40, room=(0.85, 0.9))
    assert proof_by_prices.prove_by_layer_prices(ProblemData(p), 1e6).holds is None
    found = proof_by_prices.prove_by_stage_prices(ProblemData(p), 1e6)
    assert found.holds is True
    assert "place" in found.detail


def crowded(seed, devices, layers):
    """Little more memory than the activations of a good order need."""
    r = random.Random(seed)
    room = layers / devices * (1 + devices / 2)
    return Problem(
        layers=tuple(layer(i, r.uniform(1, 3), 1.0, r.uniform(1, 2)) for i in range(layers)),
        devices=tuple(
            Device(id=f"n{d}/cpu:0", flops_per_s=r.uniform(1, 4), memory_bytes=room * r.uniform(1.2, 1.7))
            for d in range(devices)
        ),
        microbatches=16,
        objective="bottleneck",
    )


@pytest.mark.parametrize(("seed", "devices", "layers"), [(1, 16, 70), (2, 22, 46), (3, 29, 42), (4, 18, 80)])
def test_the_solvers_prices_by_place_are_found_again(seed, devices, layers):
    p = crowded(seed, devices, layers)
    reach = ReachTable(CostModel(p))
    theirs = LayerPrices(reach)
    assert theirs.by_place
    high = float(reach.work[:, -1].max())
    bound, _ = price_bound_s(theirs, volume_bound_s(reach), high, time.perf_counter() + 0.4)
    assert theirs.refute(bound * (1 - 1e-9), by_place=True)
    assert proof_by_prices.prove_by_stage_prices(ProblemData(p), bound * (1 - 2e-6)).holds is True


@pytest.mark.parametrize(("seed", "devices", "layers"), [(1, 18, 112), (2, 24, 60)])
def test_bounds_of_plans_are_checked(seed, devices, layers):
    """Too many devices for all subsets; nothing repeats."""
    p = by_place(seed, devices, layers)
    made = plan(p, time_limit_s=0.5)
    verdict = verify(p, made)
    assert verdict.ok
    assert verdict.checks[-1].checked or "bound: CP-SAT" in made.certificate.method
    assert (
        proof_by_prices.prove_by_stage_prices(ProblemData(p), made.certificate.value_s * (1 + 1e-9)).holds
        is not True
    )


def test_the_best_prices_where_places_are_alike():
    """No memory: below the limit that the linear program refutes, subgradients do no better."""
    r = random.Random(1)
    p = problem(flops=[r.uniform(1, 9) for _ in range(60)], speeds=[r.uniform(1, 2) for _ in range(18)])
    facts = ProblemData(p)
    volume = sum(x.flops for x in p.layers) / sum(d.flops_per_s for d in p.devices)
    low, high = volume, 1.1 * volume
    while high - low > 1e-5 * low:
        middle = (low + high) / 2
        low, high = (
            (middle, high) if proof_by_prices.prove_by_stage_prices(facts, middle).holds else (low, middle)
        )
    assert low > 1.005 * volume
    assert proof_by_prices.prove_by_layer_prices(facts, high).holds is None
    assert lower_bound.prove(facts, low).holds is True


def test_more_devices_than_layers():
    """Only as many places as layers: the fastest of each do not add up."""
    p = problem(flops=[1.0] * 3, speeds=[1.0] * 20)
    assert proof_by_prices.prove_by_stage_prices(ProblemData(p), 1.0).holds is True
    assert proof_by_prices.prove_by_stage_prices(ProblemData(p), 1.0 + 1e-6).holds is None


def test_one_layer_and_layers_that_take_no_time():
    assert proof_by_prices.prove_by_stage_prices(ProblemData(problem(flops=[2.0])), 2.0).holds is True
    assert proof_by_prices.prove_by_stage_prices(ProblemData(problem(flops=[2.0])), 2.1).holds is None
    assert proof_by_prices.prove_by_stage_prices(ProblemData(problem(flops=[0.0] * 4)), 1.0).holds is None


def test_too_large_says_so():
    p = problem(flops=[1.0] * 900, speeds=[1.0 + d / 100 for d in range(40)])
    found = proof_by_prices.prove_by_stage_prices(ProblemData(p), 1.0)
    assert found.holds is None
    assert "too many" in found.detail


def test_the_interior_point_method_finds_an_optimum():
    """min x + 2 y with x ≥ y, y ≥ x − 0.5 and x + y ≥ 1: x = 3/4, y = 1/4, by hand."""
    # Unknowns: x, y, then what is fixed: 1, 1/2, 0.
    rows = np.array([[0, 4, 4, 1], [1, 3, 4, 0], [0, 1, 4, 2]])
    program = convex_solvers.Program(rows, np.array([0, 1]), np.array([1.0, 2.0, 0.0, 0.0, 0.0]))
    start = np.array([1.0, 0.8, 1.0, 0.5, 0.0])
    *_, last = convex_solvers.points(program, start, above=10.0)
    assert np.allclose(last[:2], [0.75, 0.25], atol=1e-7)
    assert len(list(convex_solvers.points(program, start, above=1.0))) < 5
