"""Random problems of hybrids: optimal equals brute force over all of them, predict finds the same step."""

import pytest
from tests.planner.data_problems import compressed, delayed
from tests.planner.hybrid_problems import brute_force, random_hybrid_problem

from skyctl import InfeasibleError, plan, predict, verify
from skyctl.planner.hybrid.hybrid_bound import hybrid_bound
from skyctl.planner.verification.proofs.hybrid_bound_proof import are_prices_enough, prove_hybrid
from skyctl.planner.verification.step import CheckedStep
from skyctl.records.plan import Witness

PROBLEMS = 200
SEED = 24_000


def compressed_hybrid_problem(seed):
    return compressed(random_hybrid_problem(seed), seed)


def delayed_hybrid_problem(seed):
    return delayed(random_hybrid_problem(seed))


def check(numbers, make=random_hybrid_problem):
    for i in numbers:
        problem = make(SEED + i)
        best = brute_force(problem)
        if best is None:
            with pytest.raises(InfeasibleError):
                plan(problem)
            continue
        planned = plan(problem)
        assert planned.certificate.status == "optimal", i
        assert planned.certificate.value_s == pytest.approx(best, rel=1e-9), i
        assert planned.certificate.lower_bound_s == planned.certificate.value_s, i
        assert len(planned.pipelines) > 1, i
        assert predict(problem, planned) == planned.predicted, i
        assert verify(problem, planned).ok, (i, verify(problem, planned))
        quick = plan(problem, "heuristic")
        assert verify(problem, quick).ok, i
        assert quick.certificate.status == "feasible", i
        assert quick.certificate.value_s >= best * (1 - 1e-9), i


@pytest.mark.slow
def test_optimal_equals_brute_force_with_a_delay():
    """Also where each pipeline is one device: that is data parallelism, by a model of its own."""
    check(range(3, PROBLEMS, 10), delayed_hybrid_problem)
    for i in range(20):
        problem = delayed(random_hybrid_problem(SEED + i)).model_copy(update={"recompute": False, "ties": ()})
        try:
            planned = plan(problem.model_copy(update={"parallel": "data", "sync": "ring"}))
        except InfeasibleError:
            continue
        if len(planned.pipelines) > 1:
            as_hybrid = problem.model_copy(update={"sync": "ring"})
            predicted = predict(as_hybrid, planned)
            assert predicted.iteration_s == pytest.approx(planned.predicted.iteration_s, rel=1e-9), i
            assert predicted.sync_s == pytest.approx(planned.predicted.sync_s, rel=1e-6, abs=1e-9), i


@pytest.mark.parametrize("tens", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_same_with_compressed_sums(tens):
    check(range(10 * tens, 10 * tens + 10), compressed_hybrid_problem)


@pytest.mark.slow
@pytest.mark.parametrize(
    "tens", [pytest.param(i, marks=pytest.mark.matrix if i % 3 else ()) for i in range(PROBLEMS // 10)]
)
def test_optimal_equals_brute_force(tens):
    check(range(10 * tens, 10 * tens + 10))


def test_the_suite_has_everything_in_it():
    problems = [random_hybrid_problem(SEED + i) for i in range(PROBLEMS)]
    for share in (
        [bool(p.links) for p in problems],
        [bool(p.shared) for p in problems],
        [bool(p.times) for p in problems],
        [bool(p.ties) for p in problems],
        [p.first_stage is not None for p in problems],
        [any(d.memory_bytes is not None for d in p.devices) for p in problems],
        [p.schedule == "sequential" for p in problems],
        *([p.sync == name for p in problems] for name in ("ring", "star")),
        *([p.sync_format == name for p in problems] for name in ("bfloat16", "fixed32")),
    ):
        assert any(share)
        assert not all(share)


@pytest.mark.slow
def test_no_hybrid_with_a_delay_is_below_the_bound_by_prices():
    """And prices that claim more than the fastest hybrid takes prove nothing."""
    proved = 0
    for i in range(0, PROBLEMS, 6):
        problem = delayed(random_hybrid_problem(SEED + i))
        best, bound = brute_force(problem), hybrid_bound(problem)
        if best is None:
            continue
        assert bound.bound_s <= best * (1 + 1e-9), i
        step, witness = CheckedStep(problem), Witness(layer_prices=bound.layer_prices)
        proved += are_prices_enough(step, bound.bound_s, witness)
        assert not are_prices_enough(step, best * (1 + 1e-6), witness), i
        assert prove_hybrid(step, best * (1 + 1e-6)).holds is not True, i
        assert prove_hybrid(step, best * (1 - 1e-6)).holds is not False, i
    assert proved > PROBLEMS / 6 / 3
