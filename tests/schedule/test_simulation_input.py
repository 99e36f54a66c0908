"""A plan's play, and what its stages wait for."""

from __future__ import annotations

import random

import pytest

from skyctl.schedule.simulation_input import SimulationInput, find_waits
from skyctl.schedule.step_times import BoundaryTimes, MessageTimes, StageTimes


def test_waiting_is_idle_until_the_message_sets_out() -> None:
    hop = MessageTimes(link_s=2.0, latency_s=1.0)
    play = SimulationInput(
        "1f1b", 1, (1, 1), (0, 0), (StageTimes(1, 1), StageTimes(4, 4)), (BoundaryTimes(hop, hop),)
    )
    done = play.simulate(trace=True)
    assert done.iteration_s == 1 + 3 + 8 + 3 + 1
    ahead, back = sorted(find_waits(done), reverse=True)
    assert ahead == (1, 0, 0.0, 1.0, 4.0)
    assert back == (0, 0, 1.0, 12.0, 15.0)


@pytest.mark.parametrize("seed", range(40))
def test_waits_and_work_and_the_rest_at_the_end_are_the_step(seed: int) -> None:
    r = random.Random(seed)
    count, microbatches = r.randint(1, 4), r.randint(1, 6)
    shared = (("uplink", r.uniform(0.1, 1)),) if seed % 2 else ()
    play = SimulationInput(
        "zero-bubble",
        microbatches,
        tuple(min(microbatches, count - s + 1) for s in range(count)),
        tuple(r.randrange(microbatches) for _ in range(count)),
        tuple(StageTimes(r.uniform(1, 2), 2.0, r.uniform(0, 1), r.uniform(0, 2)) for _ in range(count)),
        tuple(
            BoundaryTimes(MessageTimes(r.uniform(0, 2), 0.1, shared), MessageTimes(0.3, 0.2, shared))
            for _ in range(count - 1)
        ),
    )
    done = play.simulate(trace=True)
    waits = find_waits(done)
    for stage in range(count):
        spans = [span for span in done.trace if span.stage == stage]
        waited_s = sum(wait.end_s - wait.start_s for wait in waits if wait.stage == stage)
        tail_s = done.iteration_s - max(span.end_s for span in spans)
        assert waited_s + tail_s == pytest.approx(done.idle_s[stage])
        assert all(w.start_s <= w.sent_s <= w.end_s for w in waits)
