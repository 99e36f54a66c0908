"""Random problems of hybrids: optimal equals brute force over all of them, predict finds the same step."""

import pytest
from tests.planner.data_problems import compressed
from tests.planner.hybrid_problems import brute_force, random_hybrid_problem

from skyctl import InfeasibleError, plan, predict, verify

PROBLEMS = 200
SEED = 24_000


def compressed_hybrid_problem(seed):
    return compressed(random_hybrid_problem(seed), seed)


def check(numbers, make=random_hybrid_problem):
    for i in numbers:
        problem = make(SEED + i)
        best = brute_force(problem)
        if best is None:
            with pytest.raises(InfeasibleError):
                plan(problem)
            continue
        made = plan(problem)
        assert made.certificate.status == "optimal", i
        assert made.certificate.value_s == pytest.approx(best, rel=1e-9), i
        assert made.certificate.lower_bound_s == made.certificate.value_s, i
        assert len(made.pipelines) > 1, i
        assert predict(problem, made) == made.predicted, i
        assert verify(problem, made).ok, (i, verify(problem, made))
        quick = plan(problem, "heuristic")
        assert verify(problem, quick).ok, i
        assert quick.certificate.status == "feasible", i
        assert quick.certificate.value_s >= best * (1 - 1e-9), i


def test_optimal_equals_brute_force_in_a_sample():
    check(range(0, PROBLEMS, 10))


@pytest.mark.parametrize("tens", range(2))
def test_the_same_with_compressed_sums(tens):
    check(range(10 * tens, 10 * tens + 10), compressed_hybrid_problem)


@pytest.mark.slow
@pytest.mark.parametrize("tens", range(PROBLEMS // 10))
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
