"""The constraint that binds, in the table's own figures, and what fills the rest of the step."""

from __future__ import annotations

import re

import pytest
from tests.planner.planner_problems import problem

from skyctl.planner.api import assigned, plan
from skyctl.planner.explanation.plan_reasons import find_binding_constraint, stage_views
from skyctl.records.problem import LayerTimes, Link

IDS = ["n0/cpu:0", "n1/cpu:0"]


def numbers(text):
    return [float(x) for x in re.findall(r"[\d.]+(?= s\b)", text)]


def test_busy_is_one_figure_with_the_optimizer_in_it():
    times = {i: LayerTimes(forward_s=(0.1,) * 4, backward_s=(0.2,) * 4, optimizer_s=(1.0,) * 4) for i in IDS}
    p = problem(flops=[1.0] * 4, times=times, objective="iteration", microbatches=16)
    planned = plan(p)
    bound = find_binding_constraint(planned)
    view = next(v for v in stage_views(planned) if v.device == bound.name)
    busy_s = next(r.compute_s for r in planned.predicted.replicas if r.device == bound.name)
    assert busy_s == pytest.approx(16 * view.stage_s + (view.stop - view.start) * 1.0)
    assert numbers(bound.detail)[:2] == pytest.approx([busy_s, planned.predicted.iteration_s], rel=0.01)
    assert f"({view.busy:.0%})" in bound.detail
    assert ";" not in bound.detail


def linked(latency_s, **more):
    links = tuple(
        Link(source=a, target=b, latency_s=latency_s, bandwidth_bytes_per_s=1e9) for a, b in (IDS, IDS[::-1])
    )
    p = problem(flops=[3.0] * 4, objective="iteration", links=links, **more)
    return assigned(p, [(IDS[0], 0, 2), (IDS[1], 2, 4)])


def test_sequential_says_what_fills_the_rest():
    detail = find_binding_constraint(linked(0.5, schedule="sequential")).detail
    assert "sequential passes one microbatch at a time" in detail
    assert numbers(detail)[-1] == pytest.approx(1.0)


def test_a_step_that_is_mostly_waiting_says_for_what():
    """Two microbatches of 6 s on each stage; 20 s of latency each way are paid for every one in flight."""
    planned = linked(20.0, microbatches=2)
    view = max(stage_views(planned), key=lambda v: v.busy)
    assert view.busy < 0.6
    detail = find_binding_constraint(planned).detail
    step_s = planned.predicted.iteration_s
    fill_s, waits_s, trip_s = numbers(detail)[-3:]
    assert trip_s == pytest.approx(40.0)
    assert fill_s + waits_s + view.busy * step_s == pytest.approx(step_s, rel=0.02)


def test_busy_devices_need_no_more_words():
    assert ";" not in find_binding_constraint(linked(0.0, microbatches=64)).detail
