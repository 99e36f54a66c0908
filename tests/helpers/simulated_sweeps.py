"""Sweeps in simulated time: the queue's own decisions, and trials whose seconds are known."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from skyctl.sweep.trial_queue import TrialQueue
from skyctl.sweep.trial_times import TimedTrial

Takes = Callable[[Mapping[str, str], str], float]
"""The seconds of a trial, by its parameters and its device."""


@dataclass(frozen=True)
class Played:
    """A sweep that was simulated. ``order``: (seconds at which it started, trial, device)."""

    makespan_s: float
    order: tuple[tuple[float, int, str], ...]


def play_sweep(
    trials: Sequence[Mapping[str, str]], speeds: Mapping[str, float], takes: Takes, per_device: int = 1
) -> Played:
    """Plays a sweep to its end; the queue learns of each trial's seconds when it ends."""
    queue = TrialQueue(speeds, per_device)
    for number, parameters in enumerate(trials, 1):
        queue.add(number, parameters)
    now, order = 0.0, list[tuple[float, int, str]]()
    running: list[tuple[float, int, str, float]] = []
    while queue.waiting or running:
        for number, device in queue.start(now):
            seconds = takes(trials[number - 1], device)
            order.append((now, number, device))
            heapq.heappush(running, (now + seconds, number, device, seconds))
        now, number, device, seconds = heapq.heappop(running)
        queue.end(number)
        queue.add_timed(TimedTrial(trials[number - 1], device, seconds))
    return Played(now, tuple(order))


def least_makespan_s(
    trials: Sequence[Mapping[str, str]], speeds: Mapping[str, float], takes: Takes, per_device: int = 1
) -> float:
    """No order is faster, for devices that take their own seconds over each trial.

    Each trial takes at least its seconds where it is fastest, and all of them together keep all places busy.
    """
    best = [min(takes(trial, device) for device in speeds) for trial in trials]
    rates = {device: per_device / takes(trials[0], device) for device in speeds}
    fastest = min(takes(trials[0], device) for device in speeds)
    return max(*best, sum(best) / (sum(rates.values()) * fastest))
