"""Runs that share devices, on numbers: alone the contract's model, together by turns; known traces."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import mean
from typing import Any

import pytest

from skyctl.schedule.actions import least_in_flight
from skyctl.schedule.simulation_input import SimulationInput
from skyctl.schedule.step_times import BoundaryTimes, MessageTimes, StageTimes
from skyctl.turns.turn_policy import IDLE_S, STARVE_S
from skyctl.turns.turn_simulation import PlacedPipeline, SharedRun, shared_step_s, step_ends


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
    played = step_ends(runs, kind)
    assert [len(of_run) for of_run in played] == [4, 4]
    for number, run in enumerate(runs):
        [placed] = run.pipelines
        alone_s = placed.pipeline.simulate().iteration_s
        assert played[number][-1] >= 4 * alone_s - 1e-6, "nobody is faster than alone"
    busy = dict.fromkeys("abc", 0.0)
    for run in runs:
        [placed] = run.pipelines
        for device, stage in zip(placed.devices, placed.pipeline.stages, strict=True):
            busy[device] += 4 * (
                placed.pipeline.microbatches * (stage.forward_s + stage.backward_s) + stage.optimizer_s
            )
    assert max(of_run[-1] for of_run in played) >= max(busy.values()) - 1e-6


def test_two_that_fill_a_device_take_twice_as_long_and_two_that_wait_fill_each_others_gaps() -> None:
    full = on("a", forward_s=0.06, backward_s=0.06, steps=20)
    assert shared_step_s([full, full], "fair") == pytest.approx([0.24, 0.24], rel=0.05)
    halves = replace(full, sync_s=0.12)
    assert shared_step_s([halves, halves], "fair") == pytest.approx([0.24, 0.24], rel=0.05)


def test_the_shortest_goes_first_and_the_highest_too() -> None:
    long, short = on("a", steps=30, forward_s=0.06), on("a", steps=5, forward_s=0.06)
    of_long, of_short = step_ends([long, short], "srtf")
    assert of_short[-1] < of_long[6]
    of_long, of_short = step_ends([replace(long, priority=1), short], "priority")
    assert of_long[-1] < of_short[1]


def job(device_s: float, steps: int, **given: Any) -> SharedRun:
    """Steps of so many device seconds, in two actions alike; ``sync_s``: without it, between steps."""
    return replace(on("a", forward_s=device_s / 2, backward_s=device_s / 2, steps=steps), **given)


def ends(jobs: list[SharedRun], kind: str) -> list[float]:
    return [of_one[-1] for of_one in step_ends(jobs, kind)]


def mean_seconds(jobs: list[SharedRun], kind: str) -> float:
    return mean(end - one.arrival_s for end, one in zip(ends(jobs, kind), jobs, strict=True))


def test_one_long_job_and_five_short_ones() -> None:
    """The limit of that trace is 3: (100 · 6) ÷ (150 + 5 · 10); who comes waits for the action under way."""
    jobs = [job(0.1, 100), *(job(0.1, 10, arrival_s=at) for at in (1.0, 2.0, 3.0, 4.0, 5.0))]
    assert 2.85 <= mean_seconds(jobs, "fifo") / mean_seconds(jobs, "srtf") <= 3.0


def test_fifo_has_who_came_first_wait_for_no_more_than_an_action() -> None:
    first, second = job(0.12, 10), job(0.12, 10, arrival_s=0.03)
    for runs in ([first, second], [second, first]):
        of_first, of_second = (ends(runs, "fifo")[runs.index(run)] for run in (first, second))
        assert of_first == pytest.approx(1.2)
        assert of_second == pytest.approx(2.4)


def test_fair_shares_of_unequal_actions() -> None:
    actions = (0.016, 0.03, 0.007)
    played = step_ends([job(device_s, round(7.0 / device_s)) for device_s in actions], "fair")
    used = [
        device_s * sum(end <= 20.0 for end in of_one)
        for device_s, of_one in zip(actions, played, strict=True)
    ]
    assert sum(used) == pytest.approx(20.0, abs=0.1)
    assert max(used) <= 1.02 * min(used)


def test_pack_of_halves() -> None:
    halves, waiting = job(0.1, 50, load=0.5), job(0.1, 50, sync_s=0.1)
    assert ends([halves] * 2, "pack") == pytest.approx([5.0, 5.0])
    assert max(ends([halves] * 2, "fifo")) == pytest.approx(10.0)
    assert max(ends([waiting] * 2, "pack")) <= 0.8 * 20.0


def test_nobody_starves() -> None:
    jobs = [job(1.0, 200, priority=9), job(1.0, 1)]
    assert ends(jobs, "priority")[1] <= 2 * (STARVE_S + 1.0)


@pytest.mark.parametrize("kind", ["fifo", "fair", "srtf", "pack", "priority"])
@pytest.mark.parametrize("seed", range(8))
def test_drawn_mixes(seed: int, kind: str) -> None:
    """Every job ends, nobody earlier than alone, and the device is never idle while somebody waits for it."""
    draw = random.Random(seed)
    jobs = [
        job(
            draw.uniform(0.001, 0.1),
            draw.randrange(1, 40),
            sync_s=draw.choice((0.0, draw.uniform(0.0, 0.1))),
            arrival_s=draw.uniform(0.0, 3.0),
            priority=draw.randrange(3),
            load=draw.choice((0.25, 0.5, 1.0)),
        )
        for _ in range(draw.randrange(1, 7))
    ]
    alone = [end - one.arrival_s for one in jobs for end in ends([replace(one, load=1.0)], kind)]
    together = step_ends(jobs, kind)
    assert [len(of_one) for of_one in together] == [one.steps for one in jobs]
    for one, alone_s, of_one in zip(jobs, alone, together, strict=True):
        assert of_one[-1] >= one.arrival_s + alone_s - 1e-6
    idle_s = IDLE_S * sum(2 * one.steps for one in jobs)
    last_s = max(of_one[-1] for of_one in together)
    assert last_s <= max(one.arrival_s for one in jobs) + sum(alone) + idle_s + 1e-6
