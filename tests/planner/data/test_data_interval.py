"""Intervals of data-parallel steps: what uncertain figures make of shares and of sums."""

import math

import pytest
from tests.planner.data_problems import data_problem

from skyctl import plan
from skyctl.planner.prediction_interval import COMMON_UNCERTAINTY, ratio_interval, with_interval

P90 = 1.2816
"""Standard deviations from a normal distribution's median to its p90."""


def uncertain(problem, devices=0.05, links=0.1):
    return problem.model_copy(
        update={
            "devices": tuple(
                d.model_copy(update={"time_uncertainty": devices, "overhead_uncertainty": devices})
                for d in problem.devices
            ),
            "links": tuple(x.model_copy(update={"uncertainty": links}) for x in problem.links),
        }
    )


def width(planned):
    interval = planned.predicted.interval
    return (interval.high_s - interval.low_s) / planned.predicted.iteration_s


def test_a_problem_without_uncertainties_has_none():
    assert with_interval(plan(data_problem(rate=100.0))).predicted.interval is None


def test_one_replica_has_its_devices_own():
    planned = with_interval(plan(uncertain(data_problem(speeds=(1.0,)))))
    expected = P90 * math.hypot(COMMON_UNCERTAINTY, 0.05)
    assert width(planned) == pytest.approx(2 * expected, rel=0.15)


def test_the_slower_of_two_equal_replicas_reaches_further_up_than_down():
    planned = with_interval(plan(uncertain(data_problem(rate=1e9), devices=0.1)))
    interval, step_s = planned.predicted.interval, planned.predicted.iteration_s
    assert interval.high_s - step_s > 1.3 * (step_s - interval.low_s)


def test_links_count_where_sums_do():
    problem = data_problem(rate=1.0, gradient=10.0, microbatches=40)  # 20 s of sums, 2 of them hidden
    planned = plan(problem)
    assert planned.predicted.sync_s > 10
    sure, vague = (with_interval(plan(uncertain(problem, 0.001, links))) for links in (0.01, 0.5))
    assert width(vague) > 1.3 * width(sure)


def test_two_plans_of_one_problem_are_compared_under_the_same_draws():
    problem = uncertain(data_problem(rate=1e9), devices=0.2)
    low, high = ratio_interval(plan(problem, "even"), plan(problem))
    assert low <= 1 <= high
    assert high - low < 1e-9  # the same plan
