"""Clocks chained to the first rank's, and steps on one clock."""

from __future__ import annotations

from types import ModuleType

import pytest

from skyctl.compare.timeline import (
    IDLE,
    TRANSFER,
    Timeline,
    TimelineSpan,
    TimelineStep,
    align_clocks,
    measured_timeline,
    simulated_timeline,
)


def test_clocks_are_chained_and_their_errors_add_up() -> None:
    # Rank 1 is 10 s ahead of rank 0 and gains a hundredth; rank 2 is 5 s behind rank 1, steadily.
    first = {
        "start": {"at_s": 10.0, "offset_s": -10.0, "error_s": 0.001},
        "end": {"at_s": 111.0, "offset_s": -11.0, "error_s": 0.002},
    }
    second = {"start": {"at_s": 5.0, "offset_s": 5.0, "error_s": 0.004}}
    clocks = align_clocks([{}, first, second])
    assert [clock.error_s for clock in clocks] == pytest.approx([0.0, 0.002, 0.006])
    assert clocks[0].to_first(3.0) == 3.0
    assert clocks[1].to_first(10.0) == pytest.approx(0.0)
    assert clocks[1].to_first(60.5) == pytest.approx(50.0)
    assert clocks[1].to_first(111.0) == pytest.approx(100.0)
    assert clocks[2].to_first(106.0) == pytest.approx(100.0)


def test_clocks_are_chained_over_whom_each_was_compared_with() -> None:
    ahead = {"start": {"at_s": 0.0, "offset_s": -10.0, "error_s": 0.001}}
    more = {"start": {"at_s": 0.0, "offset_s": -5.0, "error_s": 0.002}}
    clocks = align_clocks([{}, more, ahead], (None, 2, 0))  # the middle of a star is the last rank
    assert [clock.to_first(20.0) for clock in clocks] == pytest.approx([20.0, 5.0, 10.0])
    assert [clock.error_s for clock in clocks] == pytest.approx([0.0, 0.003, 0.001])


def test_without_readings_a_clock_is_taken_as_it_is() -> None:
    assert align_clocks([{}, {}])[1].to_first(4.0) == 4.0


def test_recorded_steps_on_one_clock(traces: ModuleType) -> None:
    line, played = traces.two_timelines()
    assert [step.number for step in line.steps] == [0, 1, 2]
    assert [step.start_s for step in line.steps] == pytest.approx([0.0, 20.0, 40.0])
    assert line.errors_s == (0.0, 0.001)
    last = line.steps[2]
    assert last.seconds == pytest.approx(played.steps[0].seconds)
    shifted = sorted((bar.stage, bar.kind, bar.microbatch, bar.start_s - 40.0) for bar in last.spans)
    planned = sorted((bar.stage, bar.kind, bar.microbatch, bar.start_s) for bar in played.steps[0].spans)
    for shifted_span, wanted in zip(shifted, planned, strict=True):
        assert shifted_span[:3] == wanted[:3]
        assert shifted_span[3] == pytest.approx(wanted[3])


def test_steps_that_a_rank_has_not_kept_are_left_out(traces: ModuleType) -> None:
    documents = traces.documents(4)
    del documents[1]["steps"][0]
    assert [step.number for step in measured_timeline(documents, traces.DEVICES).steps] == [1, 2, 3]


def test_the_typical_step_is_the_median_one_without_the_warm_up() -> None:
    def step(number: int, seconds: float) -> TimelineStep:
        return TimelineStep(number, 100.0 * number, 100.0 * number + seconds, ())

    def typical(*seconds: float) -> int:
        steps = tuple(step(i, s) for i, s in enumerate(seconds))
        return Timeline(("a",), steps, (0.0,)).typical().number

    assert typical(9.0) == 0
    assert typical(9.0, 1.0, 3.0, 2.0) == 3
    assert typical(2.0, 1.0, 1.1, 50.0) == 2


def test_what_shows_within_a_step_is_cut_off_at_its_ends() -> None:
    steps = (
        TimelineStep(0, 0.0, 4.0, (TimelineSpan(0, "F", 0, 0.0, 1.0), TimelineSpan(1, "B", 0, 3.0, 5.0))),
        TimelineStep(1, 4.0, 8.0, (TimelineSpan(1, IDLE, 0, 5.0, 9.0),)),
    )
    line = Timeline(("a", "b"), steps, (0.0, 0.0))
    assert line.within(steps[1]) == [TimelineSpan(1, "B", 0, 0.0, 1.0), TimelineSpan(1, IDLE, 0, 1.0, 4.0)]


def test_a_simulated_step_says_what_is_waited_for(traces: ModuleType) -> None:
    step = simulated_timeline(traces.PLAY, traces.DEVICES).steps[0]
    for row in (0, 1):
        assert sum(bar.seconds for bar in step.spans if bar.stage == row) == pytest.approx(step.seconds)
    assert TimelineSpan(1, IDLE, 0, 0.0, 1.0) in step.spans
    assert any(bar.kind == TRANSFER and bar.seconds == pytest.approx(0.3) for bar in step.spans)
