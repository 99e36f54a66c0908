"""AMP's choice, re-planned: by samples where lines are fast, by layers where they are slow."""

from __future__ import annotations

import pytest
from baselines.amp import choose
from baselines.common import NotApplicableError
from baselines.hybrids import as_plan
from tests.planner.data_problems import data_problem

from skyctl import plan, verify
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


def test_two_pipelines_by_hand() -> None:
    """A stage of two layers sums their gradients beside two pipelines of four microbatches each."""
    made = problem(100.0)
    layers = [x.model_copy(update={"gradient_bytes": 180.0, "output_bytes": 90.0}) for x in made.layers]
    found = choose(made.model_copy(update={"layers": tuple(layers)}))
    assert [len(row) for row in found.grid] == [2, 2]
    assert found.cuts == (0, 2, 4)
    # three more microbatches of 6 s, one through all layers, a message of 0.9 s, a ring of 360 bytes
    assert found.step_s == pytest.approx(3 * 6 + 12 + 0.9 + 3.6)


def test_what_divides_nothing_is_said() -> None:
    made = problem(1e9)
    short = LayerTimes(forward_s=[1.0], backward_s=[2.0], optimizer_s=[0.0])
    one = {"layers": made.layers[:1], "times": dict.fromkeys(made.times, short), "microbatches": 3}
    with pytest.raises(NotApplicableError):
        choose(made.model_copy(update=one))


def test_its_pipelines_become_a_plan_that_holds() -> None:
    made = plan(problem(20.0).model_copy(update={"parallel": "hybrid"}), strategy="heuristic")
    a, b, c, d = (device.id for device in made.problem.devices)
    rows = [[(a, 0, 2), (b, 2, 4)], [(d, 0, 2), (c, 2, 4)]]
    chosen = as_plan(made, rows, [4, 4])
    assert chosen is not None
    assert [[(s.device, s.start, s.stop) for s in one.stages] for one in chosen.pipelines] == rows
    assert verify(made.problem, chosen).ok
    assert chosen.predicted.iteration_s >= made.predicted.iteration_s


def test_pipelines_without_room_are_no_plan() -> None:
    hybrid = problem(20.0).model_copy(update={"parallel": "hybrid"})
    made = plan(hybrid, strategy="heuristic")
    devices = [device.model_copy(update={"memory_bytes": 1.0}) for device in hybrid.devices]
    full = made.model_copy(update={"problem": hybrid.model_copy(update={"devices": tuple(devices)})})
    rows = [[(device.id, 0, 4)] for device in hybrid.devices]
    assert as_plan(full, rows, [2] * 4) is None
