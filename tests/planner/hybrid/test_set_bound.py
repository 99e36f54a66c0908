"""The bound by sets of devices: never above the best hybrid, and proved again by verify's own code."""

import time

import numpy as np
import pytest
from tests.planner.data_problems import data_problem
from tests.planner.hybrid_problems import random_hybrid_problem

from skyctl import InfeasibleError, plan, verify
from skyctl.planner.hybrid import hybrid_plan
from skyctl.planner.hybrid.hybrid_model import HybridModel
from skyctl.planner.hybrid.set_bound import _SetRelaxation, set_bound_s
from skyctl.planner.iteration.relaxation import Relaxation
from skyctl.planner.verification.proofs.hybrid_sets import prove_by_sets
from skyctl.planner.verification.step import CheckedStep

SEED = 24_000


@pytest.mark.parametrize("i", range(60))
def test_never_above_the_best_hybrid_and_proved_again(i):
    problem = random_hybrid_problem(SEED + i)
    try:
        best = plan(problem).certificate.value_s  # equal to brute force: test_hybrid_random_suite.py
    except InfeasibleError:
        return
    step = CheckedStep(problem)
    for value in (best, 1.5 * best):
        bound = set_bound_s(HybridModel(problem), value)
        assert 0 < bound <= best * (1 + 1e-9)
        assert prove_by_sets(step, bound * (1 - 1e-9)).holds
    assert not prove_by_sets(step, best * 1.001).holds


@pytest.mark.parametrize("i", range(12))
def test_all_numbers_of_microbatches_at_once_are_as_each_by_itself(i):
    """But for ``trip``, which is the one of the least memory."""
    problem = random_hybrid_problem(SEED + i, devices=(3, 5), layers=(5, 8), microbatches=(6, 8))
    unlimited = tuple(x.model_copy(update={"memory_bytes": None}) for x in problem.devices)
    problem = problem.model_copy(update={"devices": unlimited})
    model = HybridModel(problem)
    most = problem.microbatches - 1
    table = _SetRelaxation(model, most, np.inf).least_s()
    for count in range(1, most + 1):
        relaxation = Relaxation(model.costs(count))
        first = sorted(model.base.may_be_first)
        ends = np.stack(relaxation.end)[:, first, 0].min(axis=1)
        assert np.array_equal(np.isfinite(ends), np.isfinite(table[count - 1]))
        finite = np.isfinite(ends)
        assert table[count - 1][finite] == pytest.approx(ends[finite], rel=1e-12)


def filled():
    """Seven unequal devices and few microbatches: pipelines wait for their first ones, and end unevenly."""
    speeds = (2.3, 1.9, 1.3, 0.9, 0.7, 0.6, 0.5)
    return data_problem(speeds, parallel="hybrid", rate=1e4, layers=10, microbatches=6)


def test_tighter_than_prices_where_pipelines_are_filled_and_drained():
    problem = filled()
    planned = plan(problem, time_limit_s=60)
    proof = planned.certificate
    assert proof.method.endswith("; bound by sets of devices")
    assert proof.witness is None
    assert verify(problem, planned).ok
    check = next(x for x in verify(problem, planned).checks if x.name == "bound")
    assert check.checked
    assert "disjoint sets" in check.detail
    wrong = proof.model_copy(update={"lower_bound_s": proof.value_s})
    check = next(
        x
        for x in verify(problem, planned.model_copy(update={"certificate": wrong})).checks
        if x.name == "bound"
    )
    assert not (check.ok and check.checked)


def test_out_of_time_or_too_many_devices_claims_nothing(monkeypatch):
    problem = random_hybrid_problem(SEED, devices=(4, 4), layers=(6, 6), microbatches=(4, 4))
    late = time.perf_counter() - 1
    assert set_bound_s(HybridModel(problem), 1e3, late) == 0
    many = random_hybrid_problem(SEED, devices=(12, 12), layers=(6, 6), microbatches=(4, 4))
    assert set_bound_s(HybridModel(many), 1e3) == 0
    assert prove_by_sets(CheckedStep(many), 1e-9).holds is None


def test_a_bound_that_meets_the_plan_proves_it(monkeypatch):
    problem = filled()
    monkeypatch.setattr(hybrid_plan, "set_bound_s", lambda model, value_s, deadline: value_s)
    assert plan(problem, time_limit_s=60).certificate.status == "optimal"
