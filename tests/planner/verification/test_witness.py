"""The witness of a certificate: any prices are sound, the right ones prove, and a wrong one is refused."""

from __future__ import annotations

import random

import pytest
from tests.planner.planner_problems import brute_force, encoders, random_problem, repeated

from skyctl.planner.api import plan, verify
from skyctl.planner.verification import proof_by_witness
from skyctl.planner.verification.problem_data import ProblemData
from skyctl.records.plan import Plan, Witness


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
        found = proof_by_witness.prove(
            facts, best * (1 + 1e-9), Witness(layer_prices=layers, place_prices=places)
        )
        assert found.holds is not True


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
    made = plan(problem, "optimal", time_limit_s=4.0)
    witness = made.certificate.witness
    if "prices" not in made.certificate.method:
        pytest.fail(f"this problem is to be bounded by prices, not by {made.certificate.method}")
    assert witness is not None
    assert verify(problem, made).ok
    assert Plan.model_validate_json(made.to_json()) == made


def test_a_witness_that_does_not_prove_its_bound_is_refused() -> None:
    """Without one, a bound beyond what can be proved here is told as not checked."""
    problem = encoders(40, 24).model_copy(update={"objective": "iteration"})
    made = plan(problem, "heuristic")
    value_s = made.certificate.value_s
    forged = made.certificate.model_copy(update={"lower_bound_s": value_s, "gap": 0.0, "status": "optimal"})
    unproved = verify(problem, made.model_copy(update={"certificate": forged}))
    assert [check.name for check in unproved.checks if not check.checked] == ["bound"]
    equal = Witness(layer_prices=(1.0,) * len(problem.layers))
    forged = forged.model_copy(update={"witness": equal})
    refused = verify(problem, made.model_copy(update={"certificate": forged}))
    assert [check.name for check in refused.checks if not check.ok] == ["bound"]
