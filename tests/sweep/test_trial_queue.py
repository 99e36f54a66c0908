"""Which trial starts where, by seeds: near the best order there could be, and nothing waits for ever."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping

import pytest
from tests.helpers.simulated_sweeps import Takes, least_makespan_s, play_sweep

from skyctl.sweep.trial_queue import TrialQueue
from skyctl.sweep.trial_times import ParameterNumbers, TimedTrial, TrialTimes

WIDTHS = (32, 64, 128, 256, 512)


def drawn_trials(seed: int, count: int) -> list[dict[str, str]]:
    generator = random.Random(seed)
    return [
        {"width": str(generator.choice(WIDTHS)), "lr": f"{generator.uniform(1e-4, 1e-2):.3g}"}
        for _ in range(count)
    ]


def takes_by_width(speeds: Mapping[str, float]) -> Takes:
    return lambda parameters, device: int(parameters["width"]) / 16 / speeds[device]


@pytest.mark.parametrize("seed", range(8))
def test_300_trials_end_near_the_least_makespan(seed: int) -> None:
    generator = random.Random(seed)
    devices = generator.randint(3, 12)
    speeds = {f"n{i}/cpu:0": generator.choice((1.0, 2.0, 4.0)) for i in range(devices)}
    trials, takes = drawn_trials(seed, 300), takes_by_width(speeds)
    played = play_sweep(trials, speeds, takes)
    assert sorted(number for _, number, _ in played.order) == list(range(1, 301))
    assert played.makespan_s <= 1.05 * least_makespan_s(trials, speeds, takes)


@pytest.mark.parametrize("seed", range(4))
def test_speeds_that_a_probe_got_wrong_are_learnt(seed: int) -> None:
    """The fast device was measured as the slow one."""
    measured = {"a/cpu:0": 4.0, "b/cpu:0": 1.0}
    takes = takes_by_width({"a/cpu:0": 1.0, "b/cpu:0": 4.0})
    trials = drawn_trials(seed, 300)
    played = play_sweep(trials, measured, takes)
    assert played.makespan_s <= 1.15 * least_makespan_s(trials, measured, takes)


@pytest.mark.parametrize("per_device", [1, 3])
def test_no_device_has_more_trials_than_places(per_device: int) -> None:
    speeds = {"a/cpu:0": 1.0, "b/cpu:0": 3.0}
    trials, takes = drawn_trials(1, 60), takes_by_width(speeds)
    played = play_sweep(trials, speeds, takes, per_device)
    changes = [
        change
        for at, number, device in played.order
        for change in ((at, 1, device), (at + takes(trials[number - 1], device), -1, device))
    ]
    at_once: Counter[str] = Counter()
    most: Counter[str] = Counter()
    for _, change, device in sorted(changes):  # at one moment ends come before starts
        at_once[device] += change
        most[device] = max(most[device], at_once[device])
    assert most == dict.fromkeys(speeds, per_device)


def test_a_long_trial_waits_for_the_fast_device() -> None:
    queue = TrialQueue({"fast/cpu:0": 10.0, "slow/cpu:0": 1.0})
    queue.add_timed(TimedTrial({"width": "64"}, "fast/cpu:0", 1.0))
    queue.add_timed(TimedTrial({"width": "64"}, "slow/cpu:0", 10.0))
    queue.add(1, {"width": "64"})
    queue.add(2, {"width": "64"})
    assert queue.start(0.0) == [(1, "fast/cpu:0")]
    queue.end(1)
    assert queue.start(1.0) == [(2, "fast/cpu:0")]


def test_a_trial_that_hangs_on_the_fast_device_is_not_waited_for() -> None:
    queue = TrialQueue({"fast/cpu:0": 10.0, "slow/cpu:0": 1.0})
    queue.add_timed(TimedTrial({}, "fast/cpu:0", 1.0))
    queue.add(1, {})
    queue.add(2, {})
    assert queue.start(0.0) == [(1, "fast/cpu:0")]
    now = 0.0
    while not (begun := queue.start(now)):
        now += 0.5
    assert begun == [(2, "slow/cpu:0")]
    assert now <= 11.0


def test_trials_of_a_lost_device_run_elsewhere() -> None:
    queue = TrialQueue({"a/cpu:0": 1.0, "b/cpu:0": 1.0})
    for number in (1, 2, 3):
        queue.add(number, {})
    assert queue.start(0.0) == [(1, "a/cpu:0"), (2, "b/cpu:0")]
    queue.lose(["b/cpu:0"])
    queue.put_back(2)
    assert (queue.free, queue.waiting, queue.running) == (0, 2, 1)
    assert queue.start(0.0) == []
    queue.end(1)
    assert queue.start(1.0) == [(2, "a/cpu:0")]


def test_predicted_seconds_follow_parameters_and_devices() -> None:
    speeds = {"a/cpu:0": 2.0, "b/cpu:0": 1.0}
    trials = drawn_trials(5, 40)
    takes = takes_by_width({"a/cpu:0": 1.0, "b/cpu:0": 1.0})  # both are alike, whatever was measured
    timed = [
        TimedTrial(trial, device, takes(trial, device))
        for trial, device in zip(trials, ["a/cpu:0", "b/cpu:0"] * 20, strict=True)
    ]
    times = TrialTimes(timed, ParameterNumbers(trials), speeds)
    for trial in trials:
        for device in speeds:
            predicted = times.work(trial) * times.pace(device)
            assert math.isclose(predicted, takes(trial, device), rel_tol=0.1)


def test_what_was_timed_on_another_cluster_says_nothing() -> None:
    queue = TrialQueue({"a/cpu:0": 1e9, "b/cpu:0": 1e8})
    queue.add_timed(TimedTrial({}, "gone/cpu:0", 5.0))
    queue.add(1, {})
    assert queue.start(0.0) == [(1, "a/cpu:0")]
