"""A time limit holds for all that a plan takes: each part that can take long looks at the clock."""

import math
import random
import time

import pytest

from skyctl import plan, predict
from skyctl.planner.bottleneck import device_subsets
from skyctl.planner.cost_model import CostModel
from skyctl.planner.heuristic import simulated_annealing
from skyctl.planner.heuristic.heuristic_plan import heuristic_placement
from skyctl.planner.iteration.pipeline_shapes import ShapeSet
from skyctl.planner.iteration.round_trip_bound import RoundTripBound
from skyctl.planner.optimal_search import good_placement
from skyctl.records.problem import Device, Layer, Link, Problem

MUCH_SLACK_S = 10.0
"""CPU seconds that may come to a limit; without a limit, these problems take from 40 s on."""


def chain(devices, layers, *, microbatches, sites=1, memory=None, **more):
    """Unequal layers and devices, every pair linked, slowly between sites."""
    r = random.Random(devices)
    ids = [f"n{i}/cpu:0" for i in range(devices)]
    links = tuple(
        Link(
            source=a, target=b, bandwidth_bytes_per_s=r.uniform(1e7, 1e8),
            latency_s=r.uniform(1e-4, 1e-3) if i % sites == j % sites else r.uniform(0.01, 0.04),
        )
        for i, a in enumerate(ids)
        for j, b in enumerate(ids)
        if i != j
    )  # fmt: skip
    return Problem(
        layers=tuple(
            Layer(
                name=f"layer{i}", flops=r.uniform(2e8, 2e9), state_bytes=1e7, activation_bytes=1e4,
                output_bytes=r.uniform(5e4, 2e5),
            )
            for i in range(layers)
        ),
        devices=tuple(
            Device(id=i, flops_per_s=r.uniform(1e10, 4e10), memory_bytes=memory) for i in ids
        ),
        links=links,
        microbatches=microbatches,
        **more,
    )  # fmt: skip


@pytest.mark.parametrize("devices", [4, 16])
def test_a_hundred_thousand_microbatches_are_planned_within_the_limit(devices):
    problem = chain(devices, 24, microbatches=100_000)
    began = time.process_time()
    planned = plan(problem, time_limit_s=1.0)
    assert time.process_time() - began < 1.0 + MUCH_SLACK_S
    assert planned.certificate.lower_bound_s is not None
    assert predict(problem, planned) == planned.predicted


def late():
    return time.perf_counter() - 1


def test_the_heuristic_takes_its_best_start_where_time_is_out(monkeypatch):
    steps = []
    step = simulated_annealing._Chains.step
    monkeypatch.setattr(simulated_annealing._Chains, "step", lambda *args: steps.append(1) or step(*args))
    model = CostModel(chain(12, 40, microbatches=16))
    assert model.is_allowed(heuristic_placement(model, deadline=late()))
    assert not steps
    assert heuristic_placement(model) == heuristic_placement(model, deadline=math.inf)
    assert steps


def test_where_stages_may_recompute_the_heuristic_looks_at_the_clock_too():
    model = CostModel(chain(6, 40, microbatches=16, memory=3e8, recompute=True))
    assert model.is_allowed(good_placement(model, deadline=late()))


def test_subsets_are_left_undecided_where_time_is_out():
    model = CostModel(chain(14, 40, microbatches=16))
    within = device_subsets.placement_within(model, math.inf)
    assert within is not None
    low = 0.2 * sum(model.work_s[0])
    with pytest.raises(TimeoutError):
        device_subsets.placement_within(model, low * 1e-6, deadline=late())


def test_shapes_of_a_pipeline_are_not_listed_on_when_time_is_out():
    """64 devices in four sites have hundreds of thousands, which took half a minute."""
    bound = RoundTripBound(CostModel(chain(64, 80, microbatches=32, sites=4)), 1e4, late())
    assert bound.largest(1.0, 1e4) == 1.0
    with pytest.raises(TimeoutError):
        bound.shapes.ordered(ShapeSet(40, 0, 0))
