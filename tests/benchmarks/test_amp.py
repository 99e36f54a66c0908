"""AMP's choice, re-planned: by samples where lines are fast, by layers where they are slow."""

from __future__ import annotations

import pytest
from baselines.amp import choose
from baselines.common import NotApplicableError
from tests.planner.data_problems import data_problem

from skyctl.records.problem import LayerTimes, Problem


def problem(rate: float) -> Problem:
    """Four layers of 3 s a microbatch on each of four devices, a gradient of 100 bytes a layer."""
    made = data_problem((1.0,) * 4, rate=rate, layers=4, gradient=100.0)
    each = LayerTimes(forward_s=[1.0] * 4, backward_s=[2.0] * 4, optimizer_s=[0.0] * 4)
    return made.model_copy(update={"times": {device.id: each for device in made.devices}})


def test_the_degrees_follow_the_lines() -> None:
    fast = choose(problem(1e9))
    assert [len(row) for row in fast.grid] == [1, 1, 1, 1]
    assert fast.step_s == pytest.approx(24.0)  # two microbatches of twelve seconds each
    slow = choose(problem(1.0))
    assert [len(row) for row in slow.grid] == [4]
    assert slow.cuts == (0, 1, 2, 3, 4)


def test_what_divides_nothing_is_said() -> None:
    made = problem(1e9)
    short = LayerTimes(forward_s=[1.0], backward_s=[2.0], optimizer_s=[0.0])
    one = {"layers": made.layers[:1], "times": dict.fromkeys(made.times, short), "microbatches": 3}
    with pytest.raises(NotApplicableError):
        choose(made.model_copy(update=one))
