"""The report as text: whole, escaped, and with nothing in it that needs a network or says who made it."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from types import ModuleType

import pytest

from skyctl.compare.charts.chart import HorizontalLine
from skyctl.compare.charts.step_charts import prediction_chart, step_time_chart
from skyctl.compare.outcome import StrategyOutcome
from skyctl.compare.report_page import render_report
from skyctl.planner.api import plan
from skyctl.records.problem import Device, Layer, Problem

RECORDED = Path(__file__).with_name("report_texts.txt")
HOSTILE = ("<script>alert(1)&amp;\"'", "b --><img src=x onerror=alert(1)>", "\u202eevil\x07")


def test_every_section_is_there_and_every_tag_is_closed(three, reports: ModuleType) -> None:
    read = reports.Reader(render_report(reports.make_report(three, full=True)))
    assert read.faults == []
    assert len(read.ids) == len(set(read.ids))
    for ident in reports.IDS:
        assert ident in read.ids
    for words in ("optimal is 1.56× as fast as even, measured (predicted 1.67×)", "proved optimal", "holds",
                  "skyctl verify", "layers 0–8", "adding laptop"):  # fmt: skip
        assert words in read.words.replace("\u00a0", " "), words


def test_nothing_is_loaded_or_run(three, reports: ModuleType) -> None:
    text = render_report(reports.make_report(three, full=True))
    read = reports.Reader(text)
    assert not read.tags & {"script", "iframe", "img", "object", "embed", "base", "form"}
    for tag, key, value in read.attributes:
        assert not key.startswith("on"), (tag, key)
        if key in ("src", "href", "xlink:href"):
            assert value.startswith(("#", "data:,")), (tag, value)
    assert not re.search(r"https?://|@import|url\((?!#)", text)
    assert (
        "meta",
        "content",
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:",
    ) in read.attributes


def test_names_are_never_markup(outcome, reports: ModuleType) -> None:
    devices = [f"{name}/cpu:0" for name in HOSTILE]
    bad = outcome("optimal", devices=devices, counts=(4, 4, 4), compute_s=(1.0, 1.0, 1.0), error=HOSTILE[1])
    none = StrategyOutcome(HOSTILE[0], None, HOSTILE[1])
    read = reports.Reader(render_report(reports.make_report([none, bad], full=True)))
    assert read.faults == []
    assert not read.tags & {"script", "img"}
    assert "<script>alert(1)" in read.words
    assert "\x07" not in read.words


@pytest.mark.parametrize("case", ["nothing", "infeasible", "one device", "zeros", "failed", "planned only"])
def test_edges(case: str, outcome, reports: ModuleType) -> None:
    cases = {
        "nothing": [],
        "infeasible": [
            StrategyOutcome("even", None, "needs 3.1 GiB"),
            StrategyOutcome("optimal", None, "", undecided=True),
        ],
        "one device": [outcome(devices=("a/cpu:0",), counts=(12,), compute_s=(2.0,), steps_s=[2.0, 2.1])],
        "zeros": [outcome(compute_s=(0.0, 0.0), step_s=0.0)],
        "failed": [outcome("even", steps_s=[2.0, 2.1]), outcome("optimal", error="rank 1 died")],
        "planned only": [outcome("even"), outcome("optimal", bound_s=2.0, status="bounded")],
    }
    read = reports.Reader(
        render_report(reports.make_report(cases[case], full=case not in ("nothing", "infeasible")))
    )
    assert read.faults == []
    assert set(reports.IDS) <= set(read.ids)
    assert "nan" not in read.words.lower().split()


def test_many_stages_and_microbatches_stay_small(reports: ModuleType) -> None:
    layer = {"flops": 1e9, "state_bytes": 1.0, "activation_bytes": 1.0, "output_bytes": 1.0}
    problem = Problem(
        layers=[Layer(name=f"layer.{i}", **layer) for i in range(128)],
        devices=[
            Device(id=f"n{i}/cpu:0", flops_per_s=1e9 * (1 + i % 3), memory_bytes=None) for i in range(64)
        ],
        microbatches=64,
    )
    text = render_report(reports.make_report([StrategyOutcome("even", plan(problem, "even"))]))
    assert reports.Reader(text).faults == []
    assert "k-F" in text
    assert len(text) < 1_000_000


def test_figures_and_their_units_stay_together(outcome, reports: ModuleType) -> None:
    text = render_report(reports.make_report([outcome("even", steps_s=[9.0, 2.4])]))
    assert "2.50\u00a0s a step, predicted" in text
    assert not re.search(r"\d (?:s|ms|%|MiB)\b", re.sub(r"<style>.*</style>", "", text, flags=re.S))


def test_intervals_are_told_and_drawn(outcome, reports: ModuleType) -> None:
    even = outcome("even", interval_s=(2.3, 2.9), steps_s=[9.0, 2.4, 2.5, 2.6])
    alone = outcome(
        "alone",
        counts=(12, 0),
        compute_s=(1.5,),
        step_s=1.5,
        interval_s=(1.4, 1.7),
        steps_s=[9.0, 1.9, 2.0, 2.1],
    )
    report = reports.make_report([even, alone])
    read = reports.Reader(render_report(report))
    assert read.faults == []
    words = read.words.replace("\u00a0", " ")
    for part in (
        "tower alone is best: 1.25× as fast as even, measured (predicted 1.67×)",
        "predicted 2.50 s (2.30–2.90)",
        "1 of 2 within their interval",
        "25.0% too short, outside",
        "alone (tower)",
        "as fast as even",
        "predicted, with its 80% interval",
        "the prediction's 80% interval",
        "the fastest device that holds the whole model",
    ):
        assert part in words, part
    (lanes,) = (panel.lanes for panel in step_time_chart(report).panels)
    whiskers = [mark for mark in lanes[0].marks if isinstance(mark, HorizontalLine)]
    assert [(mark.start, mark.end) for mark in whiskers] == [(2.3, 2.9), pytest.approx((2.42, 2.58))]
    ends = [
        mark.end
        for lane in prediction_chart(report).panels[0].lanes
        for mark in lane.marks
        if mark.kind == "level"
    ]
    assert 2.9 in ends


def test_every_word_and_figure_is_as_recorded(
    three, reports: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded before the pictures had one description each; the look was compared in a browser."""
    monkeypatch.setattr("time.perf_counter", itertools.count().__next__)
    read = reports.Reader(render_report(reports.make_report(three, full=True)))
    assert read.lines == RECORDED.read_text(encoding="utf-8").splitlines()
