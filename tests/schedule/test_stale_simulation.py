"""A parameter server's play: figures that are known, lines that are shared, and bounds that always hold."""

from __future__ import annotations

import random

import pytest

from skyctl.schedule.stale_simulation import WorkerTimes, simulate_stale
from skyctl.schedule.step_times import MessageTimes

CLOCKS = 10_000


def stalling(count: int, clocks: int, seed: int) -> list[WorkerTimes]:
    """Steps of 50 ms, of which 10% take 500."""
    draw = random.Random(seed)
    return [WorkerTimes([0.5 if draw.random() < 0.1 else 0.05 for _ in range(clocks)]) for _ in range(count)]


@pytest.mark.parametrize(
    ("staleness", "expected_s"), [(0, 0.205), (1, 0.168), (3, 0.137), (10, 0.111), (None, 0.095)]
)
def test_four_workers_that_stall_now_and_then(staleness: int | None, expected_s: float) -> None:
    """With all waiting for all 50 + 450 · (1 − 0.9⁴) = 204.8 ms; with nobody waiting 0.9 · 50 + 0.1 · 500."""
    play = simulate_stale(stalling(4, CLOCKS, seed=1), staleness)
    clock_s = play.clock_s(CLOCKS // 10)
    if staleness is None:  # each at its own pace, the unluckiest of four a little slower
        clock_s = sum(ends[-1] for ends in play.ends) / 4 / CLOCKS
    assert clock_s == pytest.approx(expected_s, rel=0.02)
    most = max(map(max, play.ahead))
    assert most > 10 if staleness is None else most == staleness


def test_one_that_is_always_slow_sets_the_pace_whatever_the_staleness() -> None:
    workers = [WorkerTimes([1.0] * 300), WorkerTimes([1.0] * 300), WorkerTimes([3.0] * 300)]
    for staleness in (0, 1, 20, None):
        assert simulate_stale(workers, staleness).run_s == pytest.approx(900.0)
    play = simulate_stale(workers, 2)
    assert play.ends[0][-1] == pytest.approx(900.0 - 2 * 3.0), "the others end two clocks before"


def test_pushes_are_applied_one_after_the_other_and_shared_lines_carry_one_message_at_a_time() -> None:
    shared = MessageTimes(0.25, 0.5, (("the root's line", 1.0),))
    workers = [
        WorkerTimes([2.0, 2.0], apply_s=0.5),
        WorkerTimes([2.0, 2.0], shared, MessageTimes(), 0.5),
        WorkerTimes([2.0, 2.0], shared, MessageTimes(), 0.5),
    ]
    play = simulate_stale(workers, 0)
    # pushes arrive at 2, 3.5 and 4.5; the last is applied at 5, and all go on
    assert [ends[0] for ends in play.ends] == pytest.approx([5.0, 5.0, 5.0])
    assert play.run_s == pytest.approx(10.0)
    free = simulate_stale(workers, None)
    assert [ends[0] for ends in free.ends] == pytest.approx([2.5, 4.0, 5.0])
    assert free.ahead[0] == [1, 1]
    assert workers[1].least_s == pytest.approx(2.0 + 1.5 + 0.5)


def test_more_staleness_is_never_slower_and_nothing_is_faster_than_the_slowest_alone() -> None:
    for seed in range(20):
        draw = random.Random(seed)
        workers = [
            WorkerTimes([draw.expovariate(1.0) for _ in range(60)], MessageTimes(draw.random(), 0.1))
            for _ in range(draw.randint(1, 5))
        ]
        runs = [simulate_stale(workers, staleness).run_s for staleness in (0, 1, 2, 5, None)]
        assert runs == sorted(runs, reverse=True), seed
        assert runs[-1] >= 60 * max(worker.least_s for worker in workers) * (1 - 1e-9)
