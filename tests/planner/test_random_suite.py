"""Fifty problems of the random suite: optimal equals brute force over every order, subset and cut.

``make bench-planner ARGS="--only exactness"`` plays all 500 and writes the table of ``docs/planner.md``.
"""

import pytest
from tests.planner.exhaustive import exhaustive
from tests.planner.planner_problems import brute_force, random_problem, suite_problem

from skyctl import InfeasibleError, plan


@pytest.mark.parametrize("i", range(50))
def test_optimal_equals_brute_force(i):
    problem = suite_problem(i)
    best = exhaustive(problem)
    if best is None:
        with pytest.raises(InfeasibleError):
            plan(problem)
        return
    proof = plan(problem).certificate
    assert proof.status == "optimal"
    assert proof.value_s == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("seed", range(12))
def test_pruning_loses_nothing(seed):
    problem = random_problem(seed)
    best = brute_force(problem)
    assert exhaustive(problem) == (best if best is None else pytest.approx(best, rel=1e-12))


def test_the_suite_has_everything_in_it():
    problems = [suite_problem(i) for i in range(50)]
    assert {(p.objective, p.schedule) for p in problems} == {
        (objective, schedule)
        for objective in ("bottleneck", "iteration")
        for schedule in ("sequential", "gpipe", "1f1b")
    }
    assert any(exhaustive(p) is None for p in problems)
    assert {len(p.devices) for p in problems} == {2, 3, 4, 5}
    assert {len(p.layers) for p in problems} == {3, 4, 5, 6, 7, 8}
    for share in (
        [bool(p.links) for p in problems],
        [bool(p.shared) for p in problems],
        [bool(p.times) for p in problems],
        [p.first_stage is not None for p in problems],
        [p.last_stage is not None for p in problems],
        [p.receive_window > 0 for p in problems],
        [any(d.memory_bytes is not None for d in p.devices) for p in problems],
    ):
        assert any(share)
        assert not all(share)
