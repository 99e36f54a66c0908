"""Three hundred random problems of data parallelism, and eighty harsh ones: optimal equals brute force, and
verify says so."""

import pytest
from tests.planner.data_problems import (
    brute_force,
    compressed,
    delayed,
    harsh_data_problem,
    random_data_problem,
)

from skyctl import InfeasibleError, plan, predict, verify


def compressed_data_problem(seed):
    return compressed(random_data_problem(seed), seed)


PROBLEMS = 300
SEED = 22_000


def tens_of(make, count):
    """A third of them in CI; ``make matrix`` takes all."""
    return [pytest.param(make, i, marks=pytest.mark.matrix if i % 3 else ()) for i in range(count)]


@pytest.mark.parametrize(
    ("make", "tens"),
    [
        *tens_of(random_data_problem, PROBLEMS // 10),
        *tens_of(harsh_data_problem, 8),
        *tens_of(compressed_data_problem, 6),
    ],
)
def test_optimal_equals_brute_force(make, tens):
    """A ring and stars, each by itself, are proved; all routes together are no slower than either."""
    for i in range(10 * tens, 10 * tens + 10):
        problem = make(SEED + i)
        optima_s = check_each_layout(i, problem)
        if not optima_s:
            continue
        planned = plan(problem)
        check(i, problem, planned)
        assert planned.certificate.value_s <= min(optima_s) * (1 + 1e-9), i
        quick = plan(problem, "heuristic")
        assert quick.predicted.iteration_s >= planned.certificate.lower_bound_s * (1 - 1e-9), i
        assert verify(problem, quick).ok, i
        trees = problem.model_copy(update={"sync": "trees"})
        check(i, trees, plan(trees))


@pytest.mark.parametrize(
    ("make", "tens"),
    [
        *tens_of(random_data_problem, 10),
        *tens_of(harsh_data_problem, 3),
    ],
)
def test_optimal_equals_brute_force_with_a_delay(make, tens):
    for i in range(10 * tens, 10 * tens + 10):
        problem = delayed(make(SEED + i))
        optima_s = check_each_layout(i, problem)
        if not optima_s:
            continue
        planned = plan(problem)
        check(i, problem, planned)
        assert planned.certificate.value_s <= min(optima_s) * (1 + 1e-9), i
        lower = {"lower_bound_s": planned.certificate.value_s * 1.01, "value_s": planned.certificate.value_s}
        wrong = planned.certificate.model_copy(update={**lower, "status": "bounded", "gap": -0.01})
        assert not verify(problem, planned.model_copy(update={"certificate": wrong})).ok, i


def check_each_layout(i, problem):
    """A ring and stars, each by itself, equal brute force: the optima of those that fit."""
    optima_s = []
    for sync in ("ring", "star"):
        asked = problem.model_copy(update={"sync": sync})
        best = brute_force(asked)
        if best is None:
            with pytest.raises(InfeasibleError):
                plan(asked)
            continue
        optima_s.append(best)
        planned = plan(asked)
        assert planned.certificate.status == "optimal", (i, sync)
        assert planned.certificate.value_s == pytest.approx(best, rel=1e-9), (i, sync)
        check(i, asked, planned)
    return optima_s


def check(i, problem, planned):
    assert predict(problem, planned) == planned.predicted, i
    verdict = verify(problem, planned)
    assert verdict.ok, (i, verdict)
    assert all(item.checked for item in verdict.checks), i


def test_the_suite_has_everything_in_it():
    problems = [random_data_problem(SEED + i) for i in range(PROBLEMS)]
    plans = [plan(p.model_copy(update={"sync": sync})) for sync in ("ring", "star") for p in problems
            if brute_force_fits(p)]  # fmt: skip
    counts = [len(made_plan.pipelines) for made_plan in plans]
    assert {1, 2, 3, 4, 5} == set(counts)
    routes = [len(made_plan.sync.groups[0].routes) for made_plan in plans if made_plan.sync is not None]
    assert min(routes) == 1  # stars
    assert max(routes) > 2  # rings
    assert any(stage.recompute for made_plan in plans for stage in made_plan.placed_stages)
    for share in (
        [bool(p.links) for p in problems],
        [bool(p.shared) for p in problems],
        [bool(p.times) for p in problems],
        [p.first_stage is not None for p in problems],
        [any(d.memory_bytes is not None for d in p.devices) for p in problems],
        *([p.sync_format == name for p in problems] for name in ("bfloat16", "fixed32", "int8")),
        [brute_force_fits(p) for p in problems],
    ):
        assert any(share)
        assert not all(share)


def brute_force_fits(problem):
    try:
        plan(problem, "alone")
    except InfeasibleError:
        return False
    return True


@pytest.mark.parametrize("seed", [11, 17])
def test_lines_too_far_apart_for_the_solver_are_planned_all_the_same(seed):
    problem = harsh_data_problem(seed)
    planned = plan(problem, time_limit_s=5.0)
    assert verify(problem, planned).ok
