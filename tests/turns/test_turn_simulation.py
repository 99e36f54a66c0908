"""Shared devices on numbers: known traces, and mixes drawn by seeds."""

from __future__ import annotations

import random
from statistics import mean

import pytest

from skyctl.turns.turn_policy import STARVE_S, TurnPolicy
from skyctl.turns.turn_simulation import SharedAction, SharedJob, jain_index, simulate_turns


def job(
    arrival_s: float, steps: int, device_s: float = 1.0, gap_s: float = 0.0, load: float = 1.0
) -> SharedJob:
    return SharedJob(arrival_s, [SharedAction(gap_s, device_s)] * steps, load=load)


def mean_seconds(jobs: list[SharedJob], kind: str) -> float:
    done = simulate_turns(jobs, TurnPolicy(kind)).completions
    return mean(at - one.arrival_s for at, one in zip(done, jobs, strict=True))


def test_one_long_job_and_five_short_ones() -> None:
    """The limit of that trace is 3: (100 · 6) ÷ (150 + 5 · 10); who comes waits for the action under way."""
    jobs = [job(0.0, 100, 0.1), *(job(float(at), 10, 0.1) for at in (1, 2, 3, 4, 5))]
    assert 2.85 <= mean_seconds(jobs, "fifo") / mean_seconds(jobs, "srtf") <= 3.0


def test_fair_shares_of_unequal_actions() -> None:
    jobs = [job(0.0, 100_000, device_s) for device_s in (0.016, 0.03, 0.007)]
    used = simulate_turns(jobs, TurnPolicy("fair"), until_s=20.0).used_s
    assert sum(used) == pytest.approx(20.0, abs=0.1)
    assert jain_index(used) >= 0.999


def test_pack_of_halves() -> None:
    jobs = [job(0.0, 50, 0.1, load=0.5) for _ in range(2)]
    waiting = [job(0.0, 50, 0.1, gap_s=0.1) for _ in range(2)]
    assert max(simulate_turns(jobs, TurnPolicy("pack")).completions) == pytest.approx(5.0)
    assert max(simulate_turns(jobs, TurnPolicy("fifo")).completions) == pytest.approx(10.0)
    assert max(simulate_turns(waiting, TurnPolicy("pack")).completions) <= 0.8 * 20.0


def test_nobody_starves() -> None:
    jobs = [
        SharedJob(0.0, [SharedAction(0.0, 0.5)] * 400, priority=9),
        SharedJob(0.0, [SharedAction(0.0, 0.5)] * 2, priority=0),
    ]
    done = simulate_turns(jobs, TurnPolicy("priority")).completions
    assert done[1] <= 2 * (STARVE_S + 1.0)


def test_jain() -> None:
    assert jain_index([1.0, 1.0, 1.0]) == 1.0
    assert jain_index([1.0, 0.0]) == 0.5
    assert jain_index([0.0, 0.0]) == 1.0


@pytest.mark.parametrize("kind", ["fifo", "fair", "srtf", "pack", "priority"])
@pytest.mark.parametrize("seed", range(8))
def test_drawn_mixes(seed: int, kind: str) -> None:
    """Every job ends, no device second is lost or made, and nothing runs before it can."""
    draw = random.Random(seed)
    jobs = [
        SharedJob(
            draw.uniform(0.0, 3.0),
            [
                SharedAction(draw.choice((0.0, draw.uniform(0.0, 0.1))), draw.uniform(0.001, 0.1))
                for _ in range(draw.randrange(40))
            ],
            priority=draw.randrange(3),
            load=draw.choice((0.25, 0.5, 1.0)),
        )
        for _ in range(draw.randrange(1, 7))
    ]
    played = simulate_turns(jobs, TurnPolicy(kind))
    work = [sum(action.device_s for action in one.actions) for one in jobs]
    for one, done, used, waited, device_s in zip(
        jobs, played.completions, played.used_s, played.waited_s, work, strict=True
    ):
        gaps = sum(action.gap_s for action in one.actions)
        assert done == pytest.approx(one.arrival_s + gaps + used + waited, abs=1e-6)
        assert used >= device_s - 1e-6
        assert kind == "pack" or used == pytest.approx(device_s, abs=1e-6)
