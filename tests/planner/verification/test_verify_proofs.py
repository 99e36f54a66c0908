"""The methods that re-derive bounds, each against brute force and against each other."""

import random

import pytest
from tests.planner.planner_problems import brute_force, encoders, layer, problem, random_problem, repeated

from skyctl.planner.api import plan
from skyctl.planner.verification.problem_data import ProblemData
from skyctl.planner.verification.proofs import lower_bound, proof_by_paths, proof_by_subsets, proof_by_witness
from skyctl.records.problem import Device, Link, Problem

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


METHODS = {"subsets": proof_by_subsets.prove, "prices": proof_by_witness.listed}


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
            holds = method(facts, (best or 1e9) * share).holds
            truth = share == BELOW or best is None
            assert holds in (truth, None), (name, share)
            if name in ("subsets", "paths"):
                assert holds == truth, share


def test_memory_has_a_price():
    """Time is plenty; together the devices are a layer's bytes short."""
    p = problem(flops=[1.0] * 40, speeds=[1.0] * 30, memory=[1.3] * 30)
    assert proof_by_witness.listed(ProblemData(p), 1e6).holds is True


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
    assert proof_by_witness.listed(facts, edge * 1.03).holds is not True
    roomier = p.model_copy(update={"first_stage": None, "last_stage": None, "receive_window": 0})
    assert proof_by_subsets.prove(ProblemData(roomier), edge * 1.03).holds is False


def test_many_equal_devices_are_counted():
    r = random.Random(5)
    p = problem(flops=[r.uniform(1, 3) for _ in range(60)], speeds=[r.choice([1, 2, 4]) for _ in range(24)])
    assert proof_by_subsets.prove(ProblemData(p), volume(p)).holds is True
    assert proof_by_subsets.few(ProblemData(p), 3 * volume(p)).holds is False


def test_too_many_subsets_say_so():
    p = problem(flops=[1.0] * 40, speeds=[1 + d / 100 for d in range(30)])
    proof = proof_by_subsets.prove(ProblemData(p), 1.0)
    assert proof.holds is None
    assert "30 devices" in proof.detail


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
        proof = proof_by_paths.prove(ProblemData(p), middle)
        assert proof.holds is not None
        low, high = (middle, high) if proof.holds else (low, middle)
    assert lower_bound.prove(ProblemData(p), low).holds is True
    assert lower_bound.prove(ProblemData(p), high * 1.001).holds is False


def test_a_step_is_at_least_its_stages():
    """Many devices: microbatches times the bound on the largest stage, plus one optimizer step."""
    slowest = encoders(40, 40)
    proof = plan(slowest, time_limit_s=4.0).certificate
    facts = ProblemData(slowest.model_copy(update={"objective": "iteration"}))
    bound_s = 8 * proof.lower_bound_s
    of_step = lower_bound.prove(facts, bound_s * (1 - 1e-6), proof.witness)
    assert of_step.holds is True
    assert "by its witness" in of_step.detail
    assert lower_bound._volume(facts, bound_s * 1.1).holds is None
    further = lower_bound.prove(facts, bound_s * 1.1)  # filling and draining take time too
    assert further.holds is True
    assert "volume bound" not in further.detail
    value_s = plan(facts.problem, "heuristic").certificate.value_s
    assert lower_bound.prove(facts, value_s * (1 + 1e-6)).holds is not True


def test_nothing_is_below_zero():
    p = problem(flops=[0.0] * 4)
    assert lower_bound.prove(ProblemData(p), 0.0).holds is True
