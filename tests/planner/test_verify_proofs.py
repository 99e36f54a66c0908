"""The methods that re-derive bounds, each against brute force and against each other."""

import random

import numpy as np
import pytest
from planner_problems import brute_force, layer, problem, random_problem

from skyctl.planner.api import plan
from skyctl.planner.verification import ellipsoid, paths, periodic, places, prices, proofs, subsets
from skyctl.planner.verification.facts import Facts
from skyctl.records.problem import Device, LayerTimes, Link, Problem

ABOVE, BELOW = 1 + 1e-6, 1 - 1e-9


def repeated(seed):
    """Small: a few layers, a pattern, a few layers; caps, pins, windows, equal devices on some."""
    r = random.Random(seed)
    base = random_problem(seed, objective="bottleneck", times={})
    period, count = r.choice([1, 2, 3]), r.randint(5, 8)

    def numbers():
        return (
            r.uniform(0.3, 3), r.uniform(1, 10), r.uniform(0.1, 2), r.uniform(0.1, 2),
            r.choice([0.0, r.uniform(0, 5)]),
        )  # fmt: skip

    pattern = [numbers() for _ in range(period)]
    rows = [pattern[i % period] for i in range(count)]
    for i in [*range(r.randint(0, 2)), *range(count - r.randint(0, 2), count)]:
        rows[i] = numbers()
    layers = tuple(layer(i, *row) for i, row in enumerate(rows))
    total = sum(x.state_bytes for x in layers)
    alike = r.random() < 0.4
    devices = tuple(
        d.model_copy(
            update={
                "memory_bytes": None if d.memory_bytes is None else total * r.uniform(0.35, 1.2),
                "flops_per_s": r.choice([1.0, 2.0]) if alike else d.flops_per_s,
            }
        )
        for d in base.devices
    )
    return base.model_copy(update={"layers": layers, "devices": devices})


def encoders(blocks, devices, seed=0, memory=False):
    """The paper's shape: an embedding, blocks of three layers, two small layers at the end."""
    r = random.Random(seed)
    flops = [5.0, *([10.0, 7.0, 7.0] * blocks), 0.5, 0.01]
    state = [30.0, *([4.0] * (3 * blocks)), 1.0, 0.1]
    room = 2.2 * sum(state) / devices
    return Problem(
        layers=tuple(layer(i, f, s) for i, (f, s) in enumerate(zip(flops, state, strict=True))),
        devices=tuple(
            Device(
                id=f"n{d}/cpu:0",
                flops_per_s=r.uniform(1, 2),
                memory_bytes=room / (1 + r.random()) if memory else None,
            )
            for d in range(devices)
        ),
        microbatches=8,
        objective="bottleneck",
    )


def least(method, p, low, high, precision=1e-7):
    """The limit where a method's proofs end, by bisection."""
    facts = Facts(p)
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
    "subsets": subsets.prove,
    "periodic": periodic.prove,
    "prices": prices.prove,
    "places": places.prove,
}


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(prices, "MAX_STEPS", 300)


@pytest.mark.parametrize("make", [random_problem, repeated])
@pytest.mark.parametrize("seed", range(60))
def test_no_method_is_wrong(make, seed):
    p = make(seed)
    best = brute_force(p)
    facts = Facts(p)
    by_step = {"paths": paths.prove, "all": lambda f, x: proofs.prove(f, x / BELOW)}
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
            proved[name] += METHODS[name](Facts(p), (best or 1e9) * BELOW).holds is True
    assert proved["periodic"] >= 25
    assert proved["prices"] >= 30
    assert proved["places"] >= proved["prices"]


@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_periodic_agrees_with_all_subsets(seed, memory):
    p = encoders(12, 9, seed, memory)
    low, high = 0.9 * volume(p), 4 * volume(p)
    exact = least(subsets.prove, p, low, high)
    facts = Facts(p)
    assert periodic.prove(facts, exact * (1 - 1e-6)).holds is True
    assert periodic.prove(facts, exact * (1 + 1e-6)).holds is not True
    assert prices.prove(facts, exact * (1 + 1e-6)).holds is not True


def test_a_refutation_is_a_plan():
    p = encoders(40, 20, 3)
    edge = least(periodic.prove, p, 0.9 * volume(p), 2 * volume(p))
    assert periodic.prove(Facts(p), edge * (1 + 1e-6)).holds is False
    assert periodic.prove(Facts(p), edge * 1.05).holds is False


def test_the_papers_size():
    """64 devices, 483 layers: the largest limit proved is next to the least one refuted by a plan."""
    p = encoders(160, 64, 1)
    facts = Facts(p)
    assert periodic.find_repeats(facts).period == 3
    edge = least(periodic.prove, p, volume(p), 1.2 * volume(p))
    assert periodic.prove(facts, edge * (1 + 1e-6)).holds is False
    assert edge > 1.001 * volume(p)


def test_the_choices_are_exact_where_the_prices_are_poor(monkeypatch):
    """Prices stopped after a few steps leave the proof to the dynamic programming."""
    minimise = ellipsoid.minimise
    monkeypatch.setattr(ellipsoid, "minimise", lambda *args, **_: minimise(*args, steps=2))
    exact = 0
    for seed in range(50):
        p = repeated(seed)
        best = brute_force(p)
        for share in (BELOW, ABOVE, 1.05):
            found = periodic.prove(Facts(p), (best or 1e9) * share)
            assert found.holds in (share == BELOW or best is None, None), (seed, share)
            exact += found.holds is True and "exact" in found.detail
    assert exact >= 15
    p = encoders(12, 9, 2)
    edge = least(subsets.prove, p, 0.9 * volume(p), 4 * volume(p))
    assert "exact" in periodic.prove(Facts(p), edge * (1 - 1e-6)).detail
    assert periodic.prove(Facts(p), edge * (1 + 1e-6)).holds is False


def test_too_many_choices_say_so(monkeypatch):
    monkeypatch.setattr(periodic, "MAX_MOVES", 10)
    minimise = ellipsoid.minimise
    monkeypatch.setattr(ellipsoid, "minimise", lambda *args, **_: minimise(*args, steps=2))
    p = encoders(12, 9, 2)
    found = periodic.prove(Facts(p), volume(p))
    assert found.holds is None
    assert "too many" in found.detail


def test_layers_that_do_not_repeat():
    r = random.Random(1)
    p = problem(flops=[r.uniform(1, 9) for _ in range(60)], speeds=[1, 2])
    assert periodic.find_repeats(Facts(p)) is None
    assert periodic.prove(Facts(p), 1.0).holds is None


def test_measured_times_repeat_only_where_all_devices_agree():
    p = encoders(10, 3)
    count = len(p.layers)
    steady = tuple(x.flops for x in p.layers)
    odd = (*steady[:7], 99.0, *steady[8:])
    zeros = (0.0,) * count

    def with_times(column):
        times = {p.devices[1].id: LayerTimes(forward_s=column, backward_s=zeros, optimizer_s=zeros)}
        return Facts(p.model_copy(update={"times": times}))

    repeats = periodic.find_repeats(with_times(steady))
    assert (repeats.period, repeats.low, repeats.high) == (3, 1, 31)
    assert periodic.find_repeats(with_times(odd)).low == 8


def test_prices_beat_the_volume_on_whole_layers():
    r = random.Random(2)
    p = problem(flops=[r.uniform(1, 9) for _ in range(80)], speeds=[r.uniform(1, 4) for _ in range(16)])
    quick = least(prices.listed, p, 0.9 * volume(p), 2 * volume(p))
    improved = least(prices.prove, p, 0.9 * volume(p), 2 * volume(p))
    assert quick > volume(p)
    assert improved > quick * 1.001
    exact = least(subsets.prove, p, volume(p), 2 * volume(p))
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
    exact = least(subsets.prove, p, 1.0, 100.0)
    priced = least(prices.prove, p, 1.0, 100.0)
    assert 0.9 * exact < priced <= exact * (1 + 1e-6)


def test_memory_has_a_price():
    """Time is plenty; together the devices are a layer's bytes short."""
    p = problem(flops=[1.0] * 40, speeds=[1.0] * 30, memory=[1.3] * 30)
    assert prices.listed(Facts(p), 1e6).holds is True


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
    facts = Facts(p)
    edge = least(subsets.prove, p, volume(p), 5 * volume(p), 0.02)
    assert subsets.prove(facts, edge * 1.03).holds is False
    assert prices.prove(facts, edge * 1.03).holds is not True
    roomier = p.model_copy(update={"first_stage": None, "last_stage": None, "receive_window": 0})
    assert subsets.prove(Facts(roomier), edge * 1.03).holds is False


def test_many_equal_devices_are_counted():
    r = random.Random(5)
    p = problem(flops=[r.uniform(1, 3) for _ in range(60)], speeds=[r.choice([1, 2, 4]) for _ in range(24)])
    assert subsets.prove(Facts(p), volume(p)).holds is True
    assert subsets.few(Facts(p), 3 * volume(p)).holds is False


def test_too_many_subsets_say_so():
    p = problem(flops=[1.0] * 40, speeds=[1 + d / 100 for d in range(30)])
    found = subsets.prove(Facts(p), 1.0)
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
        found = paths.prove(Facts(p), middle)
        assert found.holds is not None
        low, high = (middle, high) if found.holds else (low, middle)
    assert proofs.prove(Facts(p), low).holds is True
    assert proofs.prove(Facts(p), high * 1.001).holds is False


def test_a_step_is_at_least_its_stages():
    """Many devices: microbatches times the bound on the largest stage, plus one optimizer step."""
    p = encoders(40, 40).model_copy(update={"objective": "iteration"})
    facts = Facts(p)
    edge = least(periodic.prove, p, 0.9 * volume(p), 2 * volume(p))
    found = proofs.prove(facts, 8 * edge * (1 - 1e-6))
    assert found.holds is True
    assert "volume bound" in found.detail
    assert proofs._volume(facts, 8 * edge * 1.1).holds is None
    further = proofs.prove(facts, 8 * edge * 1.1)  # filling and draining take time too
    assert further.holds is True
    assert "volume bound" not in further.detail
    made = plan(p, "heuristic").certificate.value_s
    assert proofs.prove(facts, made * (1 + 1e-6)).holds is not True


def test_the_ellipsoid_method_finds_a_corner():
    corner = np.array([3.0, -2.0, 0.5])

    def function(x):
        pieces = np.concatenate((x - corner, corner - x)) * np.array([1, 2, 3, 3, 2, 1])
        at = int(pieces.argmax())
        slope = np.zeros(3)
        slope[at % 3] = (1, 2, 3, 3, 2, 1)[at] * (1 if at < 3 else -1)
        return float(pieces[at]), slope

    value, at = ellipsoid.minimise(function, np.zeros(3), 20.0, -1.0, precision=1e-9)
    assert value < 1e-8
    assert np.allclose(at, corner, atol=1e-7)


def test_nothing_is_below_zero():
    p = problem(flops=[0.0] * 4)
    assert proofs.prove(Facts(p), 0.0).holds is True
