"""Intervals of predicted steps: what uncertain figures make of a pipeline."""

from __future__ import annotations

import math
import time

import pytest

from skyctl.planner.api import plan
from skyctl.planner.prediction_interval import COMMON_UNCERTAINTY, ratio_interval, with_interval
from skyctl.records.plan import Plan
from skyctl.records.problem import Device, Layer, LayerTimes, Link, Problem

P90 = 1.2816
"""Standard deviations from a normal distribution's median to its p90."""


def problem(
    speeds: tuple[float, ...], uncertainty: float | None, *, microbatches: int = 16, layers: int = 12
) -> Problem:
    """Layers of 10 ms on a device of speed 1; 1 ms of overhead; links of 2 ms."""
    ids = [f"n{i}/cpu:0" for i in range(len(speeds))]
    return Problem(
        layers=[
            Layer(name=str(i), flops=1.0, state_bytes=1, activation_bytes=1, output_bytes=1e6)
            for i in range(layers)
        ],
        devices=[
            Device(
                id=name,
                flops_per_s=1.0,
                memory_bytes=None,
                neighbour_s=0.001,
                time_uncertainty=uncertainty,
                overhead_uncertainty=uncertainty and 0.3,
            )
            for name in ids
        ],
        times={
            name: LayerTimes(
                forward_s=[0.003 / v] * layers, backward_s=[0.007 / v] * layers, optimizer_s=[0.001] * layers
            )
            for name, v in zip(ids, speeds, strict=True)
        },
        links=[
            Link(
                source=a,
                target=b,
                latency_s=0.001,
                bandwidth_bytes_per_s=5e8,
                uncertainty=uncertainty and 0.05,
            )
            for a in ids
            for b in ids
            if a != b
        ],
        microbatches=microbatches,
    )


def relative(planned: Plan) -> tuple[float, float]:
    """How far the interval reaches down and up, as parts of the prediction."""
    interval = planned.predicted.interval
    assert interval is not None
    return (
        interval.low_s / planned.predicted.iteration_s - 1,
        interval.high_s / planned.predicted.iteration_s - 1,
    )


def test_no_interval_of_figures_that_nobody_knows_how_sure_they_are() -> None:
    planned = plan(problem((1.0, 2.0), None))
    assert with_interval(planned) is planned
    assert ratio_interval(planned, planned) is None


def test_one_device_has_the_interval_of_its_own_uncertainty() -> None:
    planned = with_interval(plan(problem((1.0,), 0.06)))
    spread = math.hypot(0.06, COMMON_UNCERTAINTY)
    low, high = relative(planned)
    assert low == pytest.approx(math.exp(-P90 * spread) - 1, abs=0.01)
    assert high == pytest.approx(math.exp(P90 * spread) - 1, abs=0.01)


def test_more_uncertain_is_wider_and_the_same_plan_has_the_same_interval() -> None:
    widths = []
    for uncertainty in (0.02, 0.05, 0.1):
        planned = with_interval(plan(problem((1.0, 2.0), uncertainty)))
        assert planned == with_interval(planned)
        low, high = relative(planned)
        assert low <= 0 <= high
        widths.append(high - low)
    assert widths == sorted(widths)


def test_the_slowest_of_many_stages_is_slower_than_predicted() -> None:
    low, high = relative(with_interval(plan(problem((1.0,) * 6, 0.1))))
    assert high > 1.5 * -low


def test_what_two_plans_have_in_common_is_no_difference() -> None:
    asked = problem((1.0, 3.0), 0.1)
    best, even = plan(asked), plan(asked, "even")
    assert ratio_interval(best, best) == (1.0, 1.0)
    interval = ratio_interval(even, best)
    assert interval is not None
    low, high = interval
    ratio = even.predicted.iteration_s / best.predicted.iteration_s
    assert 1 < low <= ratio <= high


def test_long_steps_have_the_intervals_of_short_ones_in_no_time() -> None:
    short = relative(with_interval(plan(problem((1.0, 2.0), 0.05, microbatches=200))))
    planned = plan(problem((1.0, 2.0), 0.05, microbatches=50_000))
    began = time.process_time()  # of this process, whatever else the machine does
    long = relative(with_interval(planned))
    assert time.process_time() - began < 5
    assert long == pytest.approx(short, abs=0.01)
