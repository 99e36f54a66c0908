"""Long steps: what is counted instead of played ends as if it had been played."""

import random

import pytest

from skyctl.schedule import simulation, steady_state
from skyctl.schedule.actions import least_in_flight
from skyctl.schedule.recurrence import play_recurrence
from skyctl.schedule.simulation import last_backward_ends, simulate
from skyctl.schedule.step_times import BoundaryTimes, MessageTimes, StageTimes

MICROBATCHES = 100_000
SAME = 1e-9


def random_step(seed, *, shared):
    """(schedule, microbatches, in flight, deferred weights, stages, boundaries); a third of them with times
    from a coarse grid, so that many are equal."""
    r = random.Random(seed)
    count, microbatches = r.randint(1, 5), r.randint(260, 520)
    coarse = seed % 3 == 0

    def seconds(low, high):
        return r.choice([0.25, 0.5, 1.0, 2.0]) if coarse else r.uniform(low, high)

    def message():
        names = [name for name in "ab" if shared and r.random() < 0.5]
        uses = tuple((name, seconds(0.05, 0.6)) for name in names)
        return MessageTimes(r.choice([0.0, seconds(0, 3)]), r.choice([0.0, 8 * seconds(0, 2)]), uses)

    stages = [
        StageTimes(seconds(0.2, 2), b, seconds(0, 1), r.choice([0.0, b / 2, b]))
        for b in (seconds(0.2, 2) for _ in range(count))
    ]
    boundaries = [BoundaryTimes(message(), message()) for _ in range(count - 1)]
    schedule = r.choice(["sequential", "gpipe", "1f1b", "1f1b", "eager-1f1b", "zero-bubble"])
    in_flight = [least_in_flight(schedule, s, count, microbatches) for s in range(count)]
    deferred = [0] * count
    if schedule in ("eager-1f1b", "zero-bubble"):
        in_flight = sorted((k + r.choice([0, 1, 4, 9]) for k in in_flight), reverse=True)
    if schedule == "zero-bubble":
        deferred = [r.randint(0, 4) for _ in range(count)]
    return schedule, microbatches, in_flight, deferred, stages, boundaries


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("block", range(10))
def test_ends_as_if_all_had_been_played(monkeypatch, block, shared):
    for seed in range(20 * block, 20 * block + 20):
        schedule, microbatches, in_flight, deferred, stages, boundaries = random_step(seed, shared=shared)
        args = (schedule, microbatches, in_flight, stages, boundaries)
        whole = simulate(*args, deferred_weights=deferred)
        with monkeypatch.context() as patch:
            patch.setattr(simulation, "WHOLE_STEP", 40)
            patch.setattr(steady_state, "FIRST_PLAYED", 40)
            short = simulate(*args, deferred_weights=deferred)
        assert short.iteration_s == pytest.approx(whole.iteration_s, rel=SAME), seed
        assert short.idle_s == pytest.approx(whole.idle_s, rel=SAME, abs=SAME * whole.iteration_s), seed


def pipeline(count, microbatches=MICROBATCHES):
    r = random.Random(count)
    times = [(r.uniform(0.8, 1.2), r.uniform(1.6, 2.4)) for _ in range(count)]
    links = [(r.uniform(0.1, 1.5), r.uniform(0, 2)) for _ in range(count - 1)]
    in_flight = tuple(least_in_flight("1f1b", s, count, microbatches) for s in range(count))
    return in_flight, [f for f, _ in times], [b for _, b in times], links


@pytest.mark.parametrize("count", [4, 16, 64])
def test_few_of_many_microbatches_are_played(count):
    in_flight, forward_s, backward_s, links = pipeline(count)
    played = play_recurrence(MICROBATCHES, in_flight, forward_s, backward_s, None, links, links, whole=False)
    assert len(played.inputs[-1]) < MICROBATCHES / 10
    assert max(played.free) > MICROBATCHES * max(f + b for f, b in zip(forward_s, backward_s, strict=True))


def test_a_step_of_many_microbatches_with_all_in_flight_grows_along_a_line():
    stages = [StageTimes(1.0, 2.0), StageTimes(1.5, 1.0), StageTimes(1.25, 1.75)]
    boundaries = [BoundaryTimes(MessageTimes(0.5, 3.0), MessageTimes(0.25, 1.0))] * 2
    step = simulate("gpipe", MICROBATCHES, [MICROBATCHES] * 3, stages, boundaries)
    more = simulate("gpipe", MICROBATCHES - 1, [MICROBATCHES - 1] * 3, stages, boundaries)
    assert step.iteration_s - more.iteration_s == pytest.approx(1.5 + 2.0, rel=1e-6)
    ends = last_backward_ends(
        MICROBATCHES, (MICROBATCHES,) * 3, [x.forward_s for x in stages], [x.backward_s for x in stages],
        ahead=[(0.5, 3.0)] * 2, back=[(0.25, 1.0)] * 2,
    )  # fmt: skip
    assert max(ends) == pytest.approx(step.iteration_s)


def test_what_never_takes_time_is_no_trouble():
    step = simulate("1f1b", MICROBATCHES, [2, 1], [StageTimes(0.0, 0.0)] * 2, [BoundaryTimes()])
    assert step.iteration_s == 0.0
