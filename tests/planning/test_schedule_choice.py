"""Which schedule is picked: the simplest of those that come close to the fastest."""

from __future__ import annotations

import pytest

from skyctl.errors import InfeasibleError, UndecidedError
from skyctl.planning.plan_creation import plan_best
from skyctl.planning.plan_options import PlanOptions
from skyctl.records.problem import Device, Layer, LayerTimes, Link, Problem


def problem_of(link_s=0.0, memory=None, weights=None, microbatches=8, layers=8):
    """Two equal devices; a layer takes 1 s forward and 2 s backward, a message ``link_s``."""
    ids = ("a/cpu:0", "b/cpu:0")
    times = LayerTimes(
        forward_s=(1.0,) * layers,
        backward_s=(2.0,) * layers,
        optimizer_s=(0.0,) * layers,
        weight_s=None if weights is None else (weights,) * layers,
    )
    pairs = (ids, ids[::-1])
    return Problem(
        layers=tuple(
            Layer(name=f"l{i}", flops=3.0, state_bytes=1.0, activation_bytes=1.0, output_bytes=1.0)
            for i in range(layers)
        ),
        devices=tuple(Device(id=i, flops_per_s=1.0, memory_bytes=memory) for i in ids),
        times=dict.fromkeys(ids, times),
        links=tuple(
            Link(source=a, target=b, latency_s=0.0, bandwidth_bytes_per_s=1 / link_s) for a, b in pairs
        )
        if link_s
        else (),
        microbatches=microbatches,
    )


def picked(*problems, **options):
    return plan_best(problems, PlanOptions(schedule="auto", time_limit_s=5.0, **options))


@pytest.mark.parametrize("strategy", ["even", "heuristic", "optimal"])
def test_the_simplest_where_nothing_is_gained(strategy):
    assert picked(problem_of(), strategy=strategy).problem.schedule == "1f1b"


def test_depth_for_a_slow_link():
    plan = picked(problem_of(link_s=8.0))
    assert plan.problem.schedule == "eager-1f1b"
    assert plan.stages[0].replicas[0].in_flight > 2


def test_zero_bubble_where_it_fills_what_idles():
    plan = picked(problem_of(weights=1.0, microbatches=4))
    assert plan.problem.schedule == "zero-bubble"
    assert picked(problem_of(microbatches=4)).problem.schedule == "1f1b"


def test_sequential_only_where_nothing_else_fits():
    assert picked(problem_of(memory=8.5)).problem.schedule == "sequential"
    with pytest.raises(InfeasibleError):
        picked(problem_of(memory=7.5))


def test_what_no_quick_plan_settles_is_searched_for():
    """Every layer but the first is too large while it runs, so that keeping inputs only is of no use."""
    given = problem_of(memory=8.0, microbatches=2)
    small, large = ({"activation_bytes": x, "output_bytes": 0.1} for x in (0.1, 10.0))
    layers = tuple(x.model_copy(update=large if i else small) for i, x in enumerate(given.layers))
    given = given.model_copy(update={"layers": layers, "recompute": True})
    with pytest.raises(UndecidedError):
        picked(given, strategy="heuristic")
    with pytest.raises(InfeasibleError):
        picked(given)


def test_the_number_of_microbatches_is_picked_too():
    few = problem_of(microbatches=2)
    quarter = {"forward_s": (0.25,) * 8, "backward_s": (0.5,) * 8}
    half = {i: t.model_copy(update=quarter) for i, t in few.times.items()}
    many = few.model_copy(update={"microbatches": 8, "times": half})
    assert picked(few, many).problem.microbatches == 8


def test_what_a_file_says_is_kept():
    given = problem_of(link_s=8.0)
    plan = plan_best([given], PlanOptions(time_limit_s=5.0))
    assert plan.problem == given
