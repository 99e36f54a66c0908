"""A plan played from its record takes what the plan itself predicts."""

from __future__ import annotations

import pytest
from tests.plan_changes import with_stage

from skyctl.planner.api import plan
from skyctl.planner.cost_model import CostModel, consecutive
from skyctl.planner.evaluation import least_execution, step_lower_bound_s, step_s
from skyctl.planner.plan_record import pipeline_simulations
from skyctl.records.problem import Device, Layer, LayerTimes, Link, Problem, SharedResource


def _simulation(plan):
    (simulated,) = pipeline_simulations(plan)
    return simulated


def _problem(schedule: str, *, shared: bool) -> Problem:
    ids = ["a/cpu:0", "b/cpu:0", "c/cpu:0"]
    layers = [
        Layer(name=f"l{i}", flops=1e9, state_bytes=1, activation_bytes=1, output_bytes=1e6 * (1 + i % 3))
        for i in range(9)
    ]
    times = {
        name: LayerTimes(forward_s=[0.01 * speed] * 9, backward_s=[0.02 * speed] * 9, optimizer_s=[0.001] * 9)
        for name, speed in zip(ids[:2], (1.0, 2.0), strict=True)
    }
    return Problem(
        layers=layers,
        devices=[Device(id=name, flops_per_s=5e10, memory_bytes=None) for name in ids],
        times=times,
        links=[
            Link(source=x, target=y, latency_s=0.002, bandwidth_bytes_per_s=1e8)
            for x in ids
            for y in ids
            if x != y
        ],
        shared=[SharedResource(name="uplink", bandwidth_bytes_per_s=5e7, links=[ids[:2], ids[1:]])]
        if shared
        else [],
        microbatches=6,
        schedule=schedule,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("schedule", ["sequential", "gpipe", "1f1b", "eager-1f1b"])
@pytest.mark.parametrize("shared", [False, True])
def test_the_same_step(schedule: str, shared: bool) -> None:
    planned = plan(_problem(schedule, shared=shared), "heuristic")
    played = _simulation(planned).simulate()
    assert played.iteration_s == pytest.approx(planned.predicted.iteration_s)
    by_device = {replica.device: replica.compute_s for replica in planned.predicted.replicas}
    assert played.compute_s == pytest.approx([by_device[s.replicas[0].device] for s in planned.stages])


def test_a_stage_that_recomputes_computes_its_forwards_twice() -> None:
    may_recompute = _problem("1f1b", shared=False).model_copy(update={"recompute": True})
    planned = plan(may_recompute, "even")
    play = _simulation(planned)
    changed = _simulation(with_stage(planned, 0, recompute=True))
    assert changed.stages[0].backward_s == pytest.approx(play.stages[0].backward_s + play.stages[0].forward_s)
    assert changed.stages[1:] == play.stages[1:]


def test_overhead_is_told_apart_from_layers() -> None:
    given = _problem("1f1b", shared=False)
    more = {"handling_s": 0.001, "neighbour_s": 0.003, "action_s": 0.002}
    devices = [d.model_copy(update=more) for d in given.devices]
    planned = plan(given.model_copy(update={"devices": tuple(devices)}), "even")
    play, plain = _simulation(planned), _simulation(plan(given, "even"))
    assert play.stages[0].forward_s == pytest.approx(plain.stages[0].forward_s + 0.003)
    for stage, times in enumerate(plain.stages):  # a forward is as long as is measured of one
        alone = play.layer_times(stage)
        expected = times.forward_s + 0.001, times.backward_s + 0.001
        assert (alone.forward_s, alone.backward_s) == pytest.approx(expected)


@pytest.mark.parametrize("later", [0.0, 0.25, 0.5, 0.9, 2.0])
@pytest.mark.parametrize("microbatches", [1, 2, 4, 7])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "sequential"])
def test_no_step_is_below_its_bound(schedule: str, microbatches: int, later: float) -> None:
    """Stages that wait for the first gradient, for the last one, turn after turn, or not at all."""
    ids = ["a/cpu:0", "b/cpu:0", "c/cpu:0"]
    layers = [
        Layer(name=f"l{i}", flops=1, state_bytes=1, activation_bytes=1, output_bytes=1) for i in range(3)
    ]
    times = {
        name: LayerTimes(forward_s=[share] * 3, backward_s=[share] * 3, optimizer_s=[0.0] * 3)
        for name, share in zip(ids, (1.0, later, later / 2), strict=True)
    }
    devices = [Device(id=name, flops_per_s=1, memory_bytes=None) for name in ids]
    model = CostModel(
        Problem(layers=layers, devices=devices, times=times, microbatches=microbatches, schedule=schedule)
    )
    bounds = []
    for cuts in ((3,), (1, 2), (2, 1), (1, 1, 1)):
        placement = consecutive(enumerate(cuts))
        bound_s = step_lower_bound_s(model, placement)
        taken_s = step_s(model, placement, least_execution(model, placement))
        assert bound_s <= taken_s * (1 + 1e-12), cuts
        bounds.append(bound_s / taken_s)
    assert max(bounds) == pytest.approx(1.0), "one device alone, at least"
