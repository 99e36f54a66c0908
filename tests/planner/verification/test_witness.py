"""The witness of a certificate: any prices are sound, the right ones prove, and a wrong one is refused."""

from __future__ import annotations

import random
import time

import pytest
from tests.planner.planner_problems import brute_force, encoders, layer, random_problem, repeated

from skyctl.planner.api import plan, verify
from skyctl.planner.bottleneck.layer_prices import LayerPrices, price_bound_s, volume_bound_s
from skyctl.planner.bottleneck.reach_table import ReachTable
from skyctl.planner.cost_model import CostModel
from skyctl.planner.verification.problem_data import ProblemData
from skyctl.planner.verification.proofs import proof_by_witness
from skyctl.records.plan import Plan, Witness
from skyctl.records.problem import Device, Problem


@pytest.mark.parametrize("seed", range(60))
def test_no_prices_rule_out_a_plan_that_exists(seed: int) -> None:
    """Random prices, negative ones too, and random places' prices, just above the optimum's value."""
    problem = repeated(seed) if seed % 2 else random_problem(seed, objective="bottleneck")
    best = brute_force(problem)
    if best is None:
        return
    r = random.Random(seed)
    facts = ProblemData(problem)
    for _ in range(40):
        layers = tuple(r.choice([r.uniform(0, 1), r.uniform(-0.3, 1), 1.0]) for _ in problem.layers)
        places = tuple(
            r.choice([0.0, r.uniform(0, 0.3)]) for _ in range(r.choice([0, 2, len(problem.layers)]))
        )
        proof = proof_by_witness.prove(
            facts, best * (1 + 1e-9), Witness(layer_prices=layers, place_prices=places)
        )
        assert proof.holds is not True


def test_equal_prices_prove_what_whole_layers_imply() -> None:
    """Two equal devices and three equal layers: no plan's largest stage is below two of them."""
    problem = random_problem(1, objective="bottleneck")
    problem = problem.model_copy(
        update={
            "layers": tuple(problem.layers[0].model_copy(update={"name": f"l{i}"}) for i in range(3)),
            "devices": tuple(
                problem.devices[0].model_copy(update={"id": name, "memory_bytes": None})
                for name in ("n1/cpu:0", "n2/cpu:0")
            ),
            "times": {}, "links": (), "shared": (), "first_stage": None, "last_stage": None,
        }
    )  # fmt: skip
    facts = ProblemData(problem)
    one_s = float(facts.seconds(0)[0])
    equal = Witness(layer_prices=(1.0, 1.0, 1.0))
    assert proof_by_witness.prove(facts, 2 * one_s * (1 - 1e-9), equal).holds is True
    assert proof_by_witness.prove(facts, 2 * one_s * (1 + 1e-9), equal).holds is None
    assert proof_by_witness.prove(facts, 1.0, Witness(layer_prices=(1.0, 1.0))).holds is None


def test_it_takes_moments_for_many_devices() -> None:
    """64 devices and 483 layers, memory that depends on the place: evaluated, not searched."""
    problem = encoders(160, 64, memory=True)
    facts = ProblemData(problem)
    witness = Witness(layer_prices=tuple(layer.flops for layer in problem.layers), place_prices=(1.0,) * 64)
    assert proof_by_witness.prove(facts, 1e-9, witness).holds is True


@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("asked", [{}, {"objective": "iteration", "schedule": "zero-bubble"}])
def test_a_bound_by_prices_brings_them_along(memory: bool, asked: dict[str, str]) -> None:
    problem = encoders(40, 24, memory=memory).model_copy(update=asked)
    planned = plan(problem, "optimal", time_limit_s=4.0)
    witness = planned.certificate.witness
    if "prices" not in planned.certificate.method:
        pytest.fail(f"this problem is to be bounded by prices, not by {planned.certificate.method}")
    assert witness is not None
    assert verify(problem, planned).ok
    assert Plan.model_validate_json(planned.to_json()) == planned


def test_a_witness_that_does_not_prove_its_bound_is_refused() -> None:
    """Without one, a bound beyond what can be proved here is told as not checked."""
    problem = encoders(40, 24).model_copy(update={"objective": "iteration"})
    planned = plan(problem, "heuristic")
    value_s = planned.certificate.value_s
    forged = planned.certificate.model_copy(
        update={"lower_bound_s": value_s, "gap": 0.0, "status": "optimal"}
    )
    unproved = verify(problem, planned.model_copy(update={"certificate": forged}))
    assert [check.name for check in unproved.checks if not check.checked] == ["bound"]
    equal = Witness(layer_prices=(1.0,) * len(problem.layers))
    forged = forged.model_copy(update={"witness": equal})
    refused = verify(problem, planned.model_copy(update={"certificate": forged}))
    assert [check.name for check in refused.checks if not check.ok] == ["bound"]


def by_place(seed: int, devices: int, layers: int) -> Problem:
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
            Device(id=f"n{d}/cpu:0", flops_per_s=r.uniform(1, 4), memory_bytes=mean * r.uniform(1.1, 2.2))
            for d in range(devices)
        ),
        microbatches=16,
        objective="bottleneck",
    )


def crowded(seed: int, devices: int, layers: int) -> Problem:
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
def test_prices_by_place_prove_what_was_claimed_of_them(seed: int, devices: int, layers: int) -> None:
    problem = crowded(seed, devices, layers)
    reach = ReachTable(CostModel(problem))
    theirs = LayerPrices(reach)
    assert theirs.by_place
    high = float(reach.work[:, -1].max())
    bound, _ = price_bound_s(theirs, volume_bound_s(reach), high, time.perf_counter() + 0.4)
    witness = theirs.witness(bound * (1 - 1e-9))
    assert witness is not None
    assert proof_by_witness.prove(ProblemData(problem), bound * (1 - 1e-9), witness).holds is True


@pytest.mark.parametrize(("seed", "devices", "layers"), [(1, 18, 112), (2, 24, 60)])
def test_bounds_of_plans_are_checked(seed: int, devices: int, layers: int) -> None:
    """Too many devices to go through all subsets, and nothing repeats."""
    problem = by_place(seed, devices, layers)
    planned = plan(problem, time_limit_s=0.5)
    verdict = verify(problem, planned)
    assert verdict.ok
    assert verdict.checks[-1].checked or "bound: CP-SAT" in planned.certificate.method
