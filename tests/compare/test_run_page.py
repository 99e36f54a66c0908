"""A run's page as text: what it says, and that nothing of the run is ever markup."""

from __future__ import annotations

import math
from types import ModuleType

from skyctl.compare.run_figures import DeviceTimes, RunFigures, RunNote, SeriesPoint
from skyctl.compare.run_page import render_run
from skyctl.records.interval import Interval
from skyctl.records.run_state import RunAttempt, RunState

HOSTILE = "<script>alert(1)</script>&\"'"


def state(**more: object) -> RunState:
    fields: dict[str, object] = {
        "run_id": "20261121-040405-cccc",
        "created": "2026-11-21T04:04:05+00:00",
        "written": "2026-11-21T04:04:05+00:00",
        "workload": "gpt:layers=2",
        "cluster": "here",
        "status": "running",
        "steps": 20,
        "step": 3,
        "attempts": (
            RunAttempt(
                number=1,
                began="2026-11-21T04:04:05+00:00",
                why="launched",
                from_step=0,
                devices=("a/cpu:0",),
                predicted_iteration_s=0.2,
            ),
        ),
        **more,
    }
    return RunState(**fields)


def full(run: RunState, **more: object) -> RunFigures:
    points = tuple(SeriesPoint(float(i), 3.0 - i / 10) for i in (1, 2, 3))
    fields: dict[str, object] = {
        "loss": points,
        "validation": points[1:],
        "seconds": points[1:],
        "last_loss": 2.7,
        "pace_s": 0.25,
        "samples_per_s": 128.0,
        "left_s": 4.25,
        "predicted_s": 0.2,
        "interval": Interval(low_s=0.19, high_s=0.22),
        "devices": (DeviceTimes("a/cpu:0", 0.15, 0.01, 0.04, 3, 0.8),),
        "notes": (RunNote("2026-11-21T04:04:05+00:00", "warning", "node b is slow"),),
        **more,
    }
    return RunFigures(run, run.status, run.detail, "step", **fields)  # type: ignore[arg-type]


def test_it_says_where_the_run_is(reports: ModuleType) -> None:
    page = render_run(full(state()))
    read = reports.Reader(page.document("x"))
    assert read.faults == []
    words = read.words.replace("\u00a0", " ")
    for text in ("Training: step 3 of 20", "2.700", "250 ms", "predicted 200 ms (190–220); 25.0% longer",
                 "128.0 samples/s", "75% computing", "predicted 80%", "node b is slow"):  # fmt: skip
        assert text in words, text
    assert (page.ended, page.title) == (False, "Training: step 3 of 20 · gpt:layers=2 · skyctl")


def test_nothing_of_a_run_is_markup(reports: ModuleType) -> None:
    bad = state(
        workload=HOSTILE,
        cluster=HOSTILE,
        status="failed",
        detail=HOSTILE,
        away=(HOSTILE,),
        lost={HOSTILE: HOSTILE},
        attempts=(
            RunAttempt(
                number=1, began=HOSTILE, ended=HOSTILE, why=HOSTILE, from_step=0, devices=(HOSTILE,),
                predicted_iteration_s=0.2, error=HOSTILE,
            ),
        ),
    )  # fmt: skip
    devices = (DeviceTimes(HOSTILE, 1.0, 1.0, 1.0, 2, 0.5),)
    notes = (RunNote(HOSTILE, HOSTILE, HOSTILE),)
    page = render_run(full(bad, devices=devices, notes=notes))
    document = page.document("x")
    read = reports.Reader(document)
    assert read.faults == []
    assert "script" not in read.tags  # a run that has ended asks for nothing more
    assert "<script" not in document
    assert "alert(1)" in read.words
    assert all("<script" not in part for part in page.parts.values())


def test_figures_that_can_not_be_drawn_are_left_out(reports: ModuleType) -> None:
    worst = tuple(SeriesPoint(float(i), v) for i, v in enumerate((math.nan, math.inf, -math.inf, 1e300)))
    devices = (DeviceTimes("a", math.inf, 0.0, 0.0), DeviceTimes("b", 0.0, 0.0, 0.0))
    page = render_run(
        full(state(), loss=worst, seconds=worst, validation=(), devices=devices, last_loss=math.nan)
    )
    assert reports.Reader(page.document("x")).faults == []
    assert "No step has ended yet" in page.parts["loss"]
    assert "No device has told yet" in page.parts["devices"]


def test_a_run_that_has_only_begun_has_a_page(reports: ModuleType) -> None:
    run = state(status="starting", step=0, attempts=())
    page = render_run(RunFigures(run, "starting", None, "step"))
    assert reports.Reader(page.document("x")).faults == []
    assert "Starting: step 0 of 20" in page.parts["state"]


def test_a_scripts_run_has_its_state_and_notes(reports: ModuleType) -> None:
    run = state(steps=None, order={"script": {}})
    page = render_run(RunFigures(run, "running", None, "step", notes=(RunNote("", "", "said"),)))
    assert reports.Reader(page.document("x")).faults == []
    assert "A script counts its own steps" in page.parts["loss"]
    assert "said" in page.parts["notes"]


def test_each_attempt_has_its_own_prediction() -> None:
    first = state().attempts[0]
    second = first.model_copy(update={"number": 2, "from_step": 2, "predicted_iteration_s": 0.4})
    seconds = full(state(attempts=(first, second))).seconds
    page = render_run(full(state(attempts=(first, second)), seconds=(*seconds, SeriesPoint(6.0, 0.3))))
    assert page.parts["seconds"].count('class="curve s-predicted"') == 2
