"""Runs of pipelines that share devices, on numbers: alone the contract's model, together by turns."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from skyctl.schedule.actions import least_in_flight
from skyctl.schedule.simulation_input import SimulationInput
from skyctl.schedule.step_times import BoundaryTimes, MessageTimes, StageTimes
from skyctl.turns.shared_steps import PlacedPipeline, SharedRun, shared_step_s, step_ends


def pipeline(draw: random.Random, stages: int, schedule: str = "1f1b") -> SimulationInput:
    microbatches = draw.randrange(1, 7)
    numbers = tuple(least_in_flight(schedule, s, stages, microbatches) for s in range(stages))
    times = tuple(
        StageTimes(draw.uniform(0.01, 0.05), draw.uniform(0.02, 0.09), draw.uniform(0.0, 0.02), 0.01)
        for _ in range(stages)
    )
    if schedule != "zero-bubble":
        times = tuple(replace(one, weight_s=0.0) for one in times)
    links = tuple(
        BoundaryTimes(*(MessageTimes(draw.uniform(0.0, 0.03), draw.uniform(0.0, 0.01)) for _ in range(2)))
        for _ in range(stages - 1)
    )
    return SimulationInput(schedule, microbatches, numbers, (0,) * stages, times, links)


def on(*devices: str, steps: int = 5, **times: float) -> SharedRun:
    """One microbatch through a stage on each device."""
    count = len(devices)
    stages = (StageTimes(times.get("forward_s", 0.01), times.get("backward_s", 0.02)),) * count
    given = SimulationInput("1f1b", 1, (1,) * count, (0,) * count, stages, (BoundaryTimes(),) * (count - 1))
    return SharedRun((PlacedPipeline(given, devices),), steps)


@pytest.mark.parametrize("schedule", ["sequential", "gpipe", "1f1b", "zero-bubble"])
@pytest.mark.parametrize("seed", range(8))
def test_a_run_alone_takes_what_the_model_of_a_step_says(seed: int, schedule: str) -> None:
    draw = random.Random(f"{seed} {schedule}")
    given = pipeline(draw, draw.randrange(1, 5), schedule)
    devices = tuple(f"n{s}" for s in range(len(given.stages)))
    run = SharedRun((PlacedPipeline(given, devices),), steps=3, sync_s=0.1)
    assert shared_step_s([run], "fair") == [pytest.approx(given.simulate().iteration_s + 0.1)]


@pytest.mark.parametrize("kind", ["fifo", "fair", "srtf", "pack", "priority"])
@pytest.mark.parametrize("seed", range(5))
def test_pipelines_in_opposite_orders_all_end_and_a_device_does_one_thing_at_a_time(
    seed: int, kind: str
) -> None:
    draw = random.Random(seed)
    runs = []
    for turned in (False, True):
        given = pipeline(draw, 3)
        devices = ("a", "b", "c")[:: -1 if turned else 1]
        runs.append(SharedRun((PlacedPipeline(given, devices),), steps=4))
    ends = step_ends(runs, kind)
    assert [len(of_run) for of_run in ends] == [4, 4]
    for number, run in enumerate(runs):
        [placed] = run.pipelines
        alone_s = placed.pipeline.simulate().iteration_s
        assert ends[number][-1] >= 4 * alone_s - 1e-6, "nobody is faster than alone"
    busy = dict.fromkeys("abc", 0.0)
    for run in runs:
        [placed] = run.pipelines
        for device, stage in zip(placed.devices, placed.pipeline.stages, strict=True):
            busy[device] += 4 * (
                placed.pipeline.microbatches * (stage.forward_s + stage.backward_s) + stage.optimizer_s
            )
    assert max(of_run[-1] for of_run in ends) >= max(busy.values()) - 1e-6


def test_two_that_fill_a_device_take_twice_as_long_and_two_that_wait_fill_each_others_gaps() -> None:
    full = on("a", forward_s=0.06, backward_s=0.06, steps=20)
    assert shared_step_s([full, full], "fair") == pytest.approx([0.24, 0.24], rel=0.05)
    halves = replace(full, sync_s=0.12)
    assert shared_step_s([halves, halves], "fair") == pytest.approx([0.24, 0.24], rel=0.05)


def test_the_shortest_goes_first_and_the_highest_too() -> None:
    long, short = on("a", steps=30, forward_s=0.06), on("a", steps=5, forward_s=0.06)
    ends = step_ends([long, short], "srtf")
    assert ends[1][-1] < ends[0][6]
    ends = step_ends([replace(long, priority=1), short], "priority")
    assert ends[0][-1] < ends[1][1]
