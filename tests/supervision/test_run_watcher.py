"""A run's figures as its folder has them, while it is written."""

from __future__ import annotations

import math

import pytest

from skyctl.compare.run_figures import RunFigures
from skyctl.errors import InputError
from skyctl.files import RunPaths
from skyctl.run.run_lock import acquire_run_lock
from skyctl.supervision.run_status import resolve_run
from skyctl.supervision.run_watcher import MOST_POINTS, RECENT_STEPS, RunWatcher, StepSeries

from ..helpers.watched_runs import DEVICES, RUN_ID, add_events, add_steps, attempt, write_state


def watcher() -> RunWatcher:
    return RunWatcher(resolve_run(None))


def steps_of(figures: RunFigures) -> list[float]:
    return [point.step for point in figures.loss]


def test_figures_come_as_they_are_written() -> None:
    paths = write_state()
    watched = watcher()
    empty = watched.figures()
    assert (empty.loss, empty.devices, empty.pace_s, empty.left_s) == ((), (), None, None)
    add_steps(paths, range(3))
    add_events(paths, range(3))
    assert steps_of(watched.figures()) == [1, 2, 3]
    add_steps(paths, range(3, 5), validation_loss=4.5)
    add_events(paths, range(3, 5))
    write_state(step=5)
    now = watched.figures()
    assert steps_of(now) == [1, 2, 3, 4, 5]
    assert [point.value for point in now.validation] == [4.5, 4.5]
    assert (now.last_loss, now.pace_s, now.left_s) == (4.6, 0.2, pytest.approx(15 * 0.2))
    assert now.predicted_s == 0.2


def test_the_first_step_of_an_attempt_is_warm_up() -> None:
    paths = write_state()
    add_steps(paths, [0], iteration_s=9.0)
    add_steps(paths, [1, 2])
    add_events(paths, [0], compute_s=9.0)
    add_events(paths, [1, 2])
    figures = watcher().figures()
    assert [point.step for point in figures.seconds] == [2, 3]
    assert [(one.device, one.steps) for one in figures.devices] == [(device, 2) for device in DEVICES]
    assert [one.compute_s / one.step_s for one in figures.devices] == pytest.approx([0.75, 0.5])


def test_steps_that_are_done_again_replace_those_before() -> None:
    paths = write_state()
    add_steps(paths, range(6))
    watched = watcher()
    assert len(watched.figures().loss) == 6
    again = paths.metrics.with_name("again")
    paths.metrics.rename(again)
    add_steps(paths, range(3))
    add_steps(paths, range(3, 5), loss=1.0)
    write_state(attempts=(attempt(), attempt(2, from_step=3)))
    RunPaths(RUN_ID, 2).create()
    figures = watched.figures()
    assert [point.value for point in figures.loss] == pytest.approx([5, 4.9, 4.8, 1.0, 1.0])
    assert [point.step for point in figures.seconds] == [2, 3, 5]
    assert figures.devices == ()


def test_a_long_run_has_few_points_which_are_means_of_all() -> None:
    series = StepSeries()
    for step in range(10 * MOST_POINTS + 7):
        series.add(step, float(step))
    points = series.points()
    assert len(points) <= MOST_POINTS
    assert series.width >= 10
    assert all(point.value == pytest.approx(point.step - 1) for point in points)
    assert points[-1].step <= 10 * MOST_POINTS + 7


def test_only_the_newest_events_of_a_long_attempt_are_read() -> None:
    paths = write_state()
    add_events(paths, range(500))
    assert [one.steps for one in watcher().figures().devices] == [RECENT_STEPS, RECENT_STEPS]


def test_lines_that_skyctl_never_writes_are_left_out() -> None:
    paths = write_state()
    add_steps(paths, [0, 1])
    add_steps(paths, [2], loss="<script>")
    add_steps(paths, [3], loss=math.nan)
    add_steps(paths, [4], samples_per_s="many")
    add_events(paths, [0, 1])
    add_events(paths, [2], compute_s="fast")
    add_events(paths, [3], who="rank-99")
    with paths.events.open("a") as file:
        file.write('[]\n{"event": "step"}\nno json\n' + "[" * 5000 + "\n")
    figures = watcher().figures()
    assert steps_of(figures) == [1, 2, 4, 5]
    assert figures.samples_per_s is None
    assert [one.steps for one in figures.devices] == [1, 1]
    paths.metrics.write_text("no json\n")
    assert steps_of(watcher().figures()) == []


def test_it_says_whether_anybody_supervises_the_run() -> None:
    paths = write_state()
    watched = watcher()
    assert watched.figures().status == "unsupervised"
    assert f"skyctl attach {RUN_ID}" in (watched.figures().detail or "")
    with acquire_run_lock(paths, attached=True):
        assert watched.figures().status == "running"
    write_state(status="failed", detail="rank 0 died")
    assert (watched.figures().ended, watched.figures().detail) == (True, "rank 0 died")


def test_what_the_supervisor_said_keeps_its_lines_together() -> None:
    paths = write_state()
    paths.supervisor_log.write_text("2026-11-21T04:04:05.000+00:00 warning: a\n    b\n")
    (note,) = watcher().figures().notes
    assert (note.kind, note.text) == ("warning", "a\nb")


def test_a_run_whose_folder_is_gone_is_said_to_be() -> None:
    paths = write_state()
    watched = watcher()
    paths.state.unlink()
    with pytest.raises(InputError, match=r"state\.json"):
        watched.figures()
