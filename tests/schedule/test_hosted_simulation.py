"""Steps that ask hosts of experts: as the simulator has them where nothing is asked, and what hosts add."""

from __future__ import annotations

import random

import pytest

from skyctl.schedule.hosted_simulation import HostAsk, HostedPass, HostedStage, play_hosted
from skyctl.schedule.simulation_input import SimulationInput
from skyctl.schedule.step_times import BoundaryTimes, MessageTimes, StageTimes

ALONE = SimulationInput("1f1b", 4, (1,), (0,), (StageTimes(1.0, 2.0),), ())


def pipeline(rng: random.Random) -> SimulationInput:
    count, microbatches = rng.randint(1, 4), rng.randint(1, 8)
    schedule = rng.choice(["1f1b", "gpipe"])
    depths = [microbatches if schedule == "gpipe" else min(microbatches, count - s) for s in range(count)]
    return SimulationInput(
        schedule,
        microbatches,
        tuple(depths),
        (0,) * count,
        tuple(StageTimes(rng.random(), rng.random()) for _ in range(count)),
        tuple(
            BoundaryTimes(MessageTimes(latency_s=rng.random()), MessageTimes(latency_s=rng.random()))
            for _ in range(count - 1)
        ),
    )


def test_without_asks_a_step_is_as_simulated() -> None:
    rng = random.Random(5)
    for _ in range(50):
        given = pipeline(rng)
        stages = [
            HostedStage(HostedPass((times.forward_s,)), HostedPass((times.backward_s,)))
            for times in given.stages
        ]
        (played,) = play_hosted([given], [stages], 0)
        simulated = given.simulate()
        assert played.ended_s == pytest.approx(simulated.ended_s)
        assert played.busy_s == pytest.approx(simulated.compute_s)


def asking(work_s: float, *asks: HostAsk) -> HostedStage:
    """The same in both passes: works, asks, works."""
    both = HostedPass((work_s, work_s), (asks,))
    return HostedStage(both, both)


def test_a_stage_waits_for_the_slowest_of_the_hosts_that_it_asks() -> None:
    stage = asking(0.5, HostAsk(0, 1.0, 0.2), HostAsk(1, 1.5))
    (played,) = play_hosted([ALONE], [[stage]], 2)
    assert played.ended_s == pytest.approx((8 * 2.5,))
    assert played.busy_s == played.ended_s


def test_a_host_does_one_thing_after_the_other() -> None:
    one, two = play_hosted([ALONE, ALONE], [[asking(0.25, HostAsk(0, 2.0))]] * 2, 1)
    assert max(*one.ended_s, *two.ended_s) == pytest.approx(0.25 + 16 * 2.0 + 0.25)  # the host never rests
    few = [[asking(2.0, HostAsk(0, 1.0))]] * 2
    one, two = play_hosted([ALONE, ALONE], few, 1)
    assert one.ended_s == pytest.approx((8 * 5.0,))
    assert two.ended_s == pytest.approx((8 * 5.0 + 1.0,))  # it waits once, and never again
