"""The methods that re-derive bounds, each against brute force and against each other."""

import random

import numpy as np
import pytest
from tests.planner.planner_problems import brute_force, encoders, layer, problem, random_problem, repeated

from skyctl.planner.api import plan
from skyctl.planner.verification import (
    convex_solvers,
    lower_bound,
    proof_by_paths,
    proof_by_periods,
    proof_by_prices,
    proof_by_subsets,
)
from skyctl.planner.verification.problem_data import ProblemData
from skyctl.records.problem import Device, LayerTimes, Link, Problem

ABOVE, BELOW = 1 + 1e-6, 1 - 1e-9


def least(method, p, low, high, precision=1e-7):
    """The limit where a method's proofs end, by bisection."""
    facts = ProblemData(p)
    while high - low > precision * low:
        middle = (low + high) / 2
        if method(facts, middle).holds:
            low = middle
        else:
            high = middle
    return low


def volume(p):
    return sum(x.flops for x in p.layers) / sum(d.flops_per_s for d in p.devices)


METHODS = {
    "subsets": proof_by_subsets.prove,
    "periodic": proof_by_periods.prove,
    "prices": proof_by_prices.prove_by_layer_prices,
    "places": proof_by_prices.prove_by_stage_prices,
}


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(proof_by_prices, "MAX_STEPS", 300)


@pytest.mark.parametrize("make", [random_problem, repeated])
@pytest.mark.parametrize("seed", range(60))
def test_no_method_is_wrong(make, seed):
    p = make(seed)
    best = brute_force(p)
    facts = ProblemData(p)
    by_step = {"paths": proof_by_paths.prove, "all": lambda f, x: lower_bound.prove(f, x / BELOW)}
    methods = METHODS if p.objective == "bottleneck" else by_step
    for name, method in methods.items():
        for share in (BELOW, ABOVE, 1.01, 1.3):
            found = method(facts, (best or 1e9) * share).holds
            truth = share == BELOW or best is None
            assert found in (truth, None), (name, share)
            if name in ("subsets", "paths"):
                assert found == truth, share


def test_the_methods_do_prove():
    """How often the optimum of small random problems is reached exactly."""
    proved = {"periodic": 0, "prices": 0, "places": 0}
    for seed in range(100, 140):
        p = repeated(seed)
        best = brute_force(p)
        for name in proved:
            proved[name] += METHODS[name](ProblemData(p), (best or 1e9) * BELOW).holds is True
    assert proved["periodic"] >= 25
    assert proved["prices"] >= 30
    assert proved["places"] >= proved["prices"]


@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_periodic_agrees_with_all_subsets(seed, memory):
    p = encoders(12, 9, seed, memory)
    low, high = 0.9 * volume(p), 4 * volume(p)
    exact = least(proof_by_subsets.prove, p, low, high)
    facts = ProblemData(p)
    assert proof_by_periods.prove(facts, exact * (1 - 1e-6)).holds is True
    assert proof_by_periods.prove(facts, exact * (1 + 1e-6)).holds is not True
    assert proof_by_prices.prove_by_layer_prices(facts, exact * (1 + 1e-6)).holds is not True


def test_a_refutation_is_a_plan():
    p = encoders(40, 20, 3)
    edge = least(proof_by_periods.prove, p, 0.9 * volume(p), 2 * volume(p))
    assert proof_by_periods.prove(ProblemData(p), edge * (1 + 1e-6)).holds is False
    assert proof_by_periods.prove(ProblemData(p), edge * 1.05).holds is False


def test_the_papers_size():
    """64 devices, 483 layers: the largest limit proved is next to the least one refuted by a plan."""
    p = encoders(160, 64, 1)
    facts = ProblemData(p)
    assert proof_by_periods.find_repeats(facts).period == 3
    edge = least(proof_by_periods.prove, p, volume(p), 1.2 * volume(p))
    assert proof_by_periods.prove(facts, edge * (1 + 1e-6)).holds is False
    assert edge > 1.001 * volume(p)


def test_the_choices_are_exact_where_the_prices_are_poor(monkeypatch):
    """Prices stopped after a few steps leave the proof to the dynamic programming."""
    minimise = convex_solvers.minimise
    monkeypatch.setattr(convex_solvers, "minimise", lambda *args, **_: minimise(*args, steps=2))
    exact = 0
    for seed in range(50):
        p = repeated(seed)
        best = brute_force(p)
        for share in (BELOW, ABOVE, 1.05):
            found = proof_by_periods.prove(ProblemData(p), (best or 1e9) * share)
            assert found.holds in (share == BELOW or best is None, None), (seed, share)
            exact += found.holds is True and "exact" in found.detail
    assert exact >= 15
    p = encoders(12, 9, 2)
    edge = least(proof_by_subsets.prove, p, 0.9 * volume(p), 4 * volume(p))
    assert "exact" in proof_by_periods.prove(ProblemData(p), edge * (1 - 1e-6)).detail
    assert proof_by_periods.prove(ProblemData(p), edge * (1 + 1e-6)).holds is False


def test_too_many_choices_say_so(monkeypatch):
    monkeypatch.setattr(proof_by_periods, "MAX_MOVES", 10)
    minimise = convex_solvers.minimise
    monkeypatch.setattr(convex_solvers, "minimise", lambda *args, **_: minimise(*args, steps=2))
    p = encoders(12, 9, 2)
    found = proof_by_periods.prove(ProblemData(p), volume(p))
    assert found.holds is None
    assert "too many" in found.detail


def test_layers_that_do_not_repeat():
    r = random.Random(1)
    p = problem(flops=[r.uniform(1, 9) for _ in range(60)], speeds=[1, 2])
    assert proof_by_periods.find_repeats(ProblemData(p)) is None
    assert proof_by_periods.prove(ProblemData(p), 1.0).holds is None


def test_measured_times_repeat_only_where_all_devices_agree():
    p = encoders(10, 3)
    count = len(p.layers)
    steady = tuple(x.flops for x in p.layers)
    odd = (*steady[:7], 99.0, *steady[8:])
    zeros = (0.0,) * count

    def with_times(column):
        times = {p.devices[1].id: LayerTimes(forward_s=column, backward_s=zeros, optimizer_s=zeros)}
        return ProblemData(p.model_copy(update={"times": times}))

    repeats = proof_by_periods.find_repeats(with_times(steady))
    assert (repeats.period, repeats.low, repeats.high) == (3, 1, 31)
    assert proof_by_periods.find_repeats(with_times(odd)).low == 8


def test_prices_beat_the_volume_on_whole_layers():
    r = random.Random(2)
    p = problem(flops=[r.uniform(1, 9) for _ in range(80)], speeds=[r.uniform(1, 4) for _ in range(16)])
    quick = least(proof_by_prices.listed, p, 0.9 * volume(p), 2 * volume(p))
    improved = least(proof_by_prices.prove_by_layer_prices, p, 0.9 * volume(p), 2 * volume(p))
    assert quick > volume(p)
    assert improved > quick * 1.001
    exact = least(proof_by_subsets.prove, p, volume(p), 2 * volume(p))
    assert improved <= exact * (1 + 1e-6)


def test_unrelated_devices_are_priced_by_what_each_does_best():
    r = random.Random(3)
    base = problem(flops=[1.0] * 30, speeds=[1.0] * 5)
    zeros = (0.0,) * 30
    times = {
        d.id: LayerTimes(
            forward_s=tuple(r.uniform(1, 4) for _ in range(30)), backward_s=zeros, optimizer_s=zeros
        )
        for d in base.devices
    }
    p = base.model_copy(update={"times": times})
    exact = least(proof_by_subsets.prove, p, 1.0, 100.0)
    priced = least(proof_by_prices.prove_by_layer_prices, p, 1.0, 100.0)
    assert 0.9 * exact < priced <= exact * (1 + 1e-6)


def test_memory_has_a_price():
    """Time is plenty; together the devices are a layer's bytes short."""
    p = problem(flops=[1.0] * 40, speeds=[1.0] * 30, memory=[1.3] * 30)
    assert proof_by_prices.listed(ProblemData(p), 1e6).holds is True


@pytest.mark.parametrize("window", [0, 2])
def test_fourteen_devices(window):
    """Memory by place, pins, windows; a plan found by hand is below no bound that is proved."""
    r = random.Random(4)
    layers = tuple(
        layer(i, r.uniform(1, 9), r.uniform(1, 5), r.uniform(0.1, 1), r.uniform(0.1, 1.5), r.uniform(0, 1))
        for i in range(24)
    )
    total = sum(x.state_bytes for x in layers)
    devices = tuple(
        Device(id=f"n{d}/cpu:0", flops_per_s=r.uniform(1, 4), memory_bytes=total * r.uniform(0.15, 0.4))
        for d in range(14)
    )
    p = Problem(
        layers=layers, devices=devices, microbatches=16, receive_window=window, objective="bottleneck",
        first_stage=("n3/cpu:0", "n5/cpu:0"), last_stage=("n0/cpu:0",),
    )  # fmt: skip
    facts = ProblemData(p)
    edge = least(proof_by_subsets.prove, p, volume(p), 5 * volume(p), 0.02)
    assert proof_by_subsets.prove(facts, edge * 1.03).holds is False
    assert proof_by_prices.prove_by_layer_prices(facts, edge * 1.03).holds is not True
    roomier = p.model_copy(update={"first_stage": None, "last_stage": None, "receive_window": 0})
    assert proof_by_subsets.prove(ProblemData(roomier), edge * 1.03).holds is False


def test_many_equal_devices_are_counted():
    r = random.Random(5)
    p = problem(flops=[r.uniform(1, 3) for _ in range(60)], speeds=[r.choice([1, 2, 4]) for _ in range(24)])
    assert proof_by_subsets.prove(ProblemData(p), volume(p)).holds is True
    assert proof_by_subsets.few(ProblemData(p), 3 * volume(p)).holds is False


def test_too_many_subsets_say_so():
    p = problem(flops=[1.0] * 40, speeds=[1 + d / 100 for d in range(30)])
    found = proof_by_subsets.prove(ProblemData(p), 1.0)
    assert found.holds is None
    assert "30 devices" in found.detail


def steps(devices, layers, seed, schedule="1f1b"):
    r = random.Random(seed)
    ids = [f"n{d}/cpu:0" for d in range(devices)]
    parts = tuple(
        layer(i, r.uniform(1, 3), r.uniform(1, 5), r.uniform(0.1, 1), r.uniform(0.1, 5))
        for i in range(layers)
    )
    total = sum(x.state_bytes for x in parts)
    return Problem(
        layers=parts,
        devices=tuple(
            Device(id=name, flops_per_s=r.uniform(1, 4), memory_bytes=total * r.uniform(0.4, 2))
            for name in ids
        ),
        links=tuple(
            Link(source=a, target=b, latency_s=r.uniform(0, 0.5), bandwidth_bytes_per_s=r.uniform(1, 10))
            for a in ids
            for b in ids
            if a != b
        ),
        microbatches=8,
        schedule=schedule,
    )


def test_paths_settle_six_devices():
    """Proved and refuted meet: the optimum is in between, to 1e-6."""
    p = steps(6, 16, 1)
    low, high = 1.0, 1e3
    while high - low > 1e-6 * low:
        middle = (low + high) / 2
        found = proof_by_paths.prove(ProblemData(p), middle)
        assert found.holds is not None
        low, high = (middle, high) if found.holds else (low, middle)
    assert lower_bound.prove(ProblemData(p), low).holds is True
    assert lower_bound.prove(ProblemData(p), high * 1.001).holds is False


def test_a_step_is_at_least_its_stages():
    """Many devices: microbatches times the bound on the largest stage, plus one optimizer step."""
    p = encoders(40, 40).model_copy(update={"objective": "iteration"})
    facts = ProblemData(p)
    edge = least(proof_by_periods.prove, p, 0.9 * volume(p), 2 * volume(p))
    found = lower_bound.prove(facts, 8 * edge * (1 - 1e-6))
    assert found.holds is True
    assert "volume bound" in found.detail
    assert lower_bound._volume(facts, 8 * edge * 1.1).holds is None
    further = lower_bound.prove(facts, 8 * edge * 1.1)  # filling and draining take time too
    assert further.holds is True
    assert "volume bound" not in further.detail
    made = plan(p, "heuristic").certificate.value_s
    assert lower_bound.prove(facts, made * (1 + 1e-6)).holds is not True


def test_the_ellipsoid_method_finds_a_corner():
    corner = np.array([3.0, -2.0, 0.5])

    def function(x):
        placement = np.concatenate((x - corner, corner - x)) * np.array([1, 2, 3, 3, 2, 1])
        at = int(placement.argmax())
        slope = np.zeros(3)
        slope[at % 3] = (1, 2, 3, 3, 2, 1)[at] * (1 if at < 3 else -1)
        return float(placement[at]), slope

    value, at = convex_solvers.minimise(function, np.zeros(3), 20.0, -1.0, precision=1e-9)
    assert value < 1e-8
    assert np.allclose(at, corner, atol=1e-7)


def test_nothing_is_below_zero():
    p = problem(flops=[0.0] * 4)
    assert lower_bound.prove(ProblemData(p), 0.0).holds is True
