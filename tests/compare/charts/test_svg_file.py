"""Charts as SVG files: sizes, odd names, nothing to draw, and nothing that needs more than the file."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from skyctl.compare.charts.chart import ChartGroup
from skyctl.compare.charts.device_names import device_names, shortened
from skyctl.compare.charts.picture_files import picture_files
from skyctl.compare.charts.svg_file import style, write_svg
from skyctl.compare.charts.timeline_charts import plot_trace
from skyctl.compare.outcome import StrategyOutcome
from skyctl.compare.report_page import render_report
from skyctl.compare.timeline import simulated_timeline
from skyctl.errors import SkyctlError
from skyctl.schedule.simulation_input import SimulationInput
from skyctl.schedule.step_times import BoundaryTimes, MessageTimes, StageTimes


def _size(path: Path) -> tuple[float, float]:
    """Of a picture that is sound: XML, with nothing in it that is outside of the page or not a number."""
    text = path.read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert not re.search(r"\bnan\b|\binf\b|https?://(?!www\.w3\.org)|@import|var\(|<script|<img", text)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for element in root.iter():
        for name, most in (("x", width), ("y", height)):
            at = element.attrib.get(name, "0")
            assert at.endswith("%") or -20 <= float(at) <= most, (element.tag, element.attrib)
    return width, height


def _play(stages: int, microbatches: int, schedule: str = "zero-bubble") -> SimulationInput:
    in_flight = tuple(min(microbatches, stages - s) for s in range(stages))
    message = MessageTimes(0.1, 0.01)
    times = (StageTimes(1.0, 2.0, 0.5, 0.9),) * stages
    boundaries = (BoundaryTimes(message, message),) * (stages - 1)
    return SimulationInput(schedule, microbatches, in_flight, (0,) * stages, times, boundaries)


def test_every_picture_of_a_report_is_drawn(three, reports: ModuleType, tmp_path: Path) -> None:
    drawn = {}
    for picture in picture_files(reports.make_report(three, full=True)):
        drawn[picture.name] = path = write_svg(tmp_path / picture.file, *picture.groups)
        assert _size(path)[0] == 1000
        assert re.search(r"<(rect|path|circle) (?!width=\"100%)", path.read_text().partition("</defs>")[2]), (
            path
        )
    assert list(drawn) == [
        "plot", "cluster", "links", "steps", "bound", "prediction", "losses",
        "microbatches sweep", "nodes sweep",
    ]  # fmt: skip


def test_marks_are_drawn_as_in_the_report(three, reports: ModuleType, tmp_path: Path) -> None:
    report = reports.make_report(three, full=True)
    page = render_report(report)
    for picture in picture_files(report):
        text = write_svg(tmp_path / picture.file, *picture.groups).read_text(encoding="utf-8")
        marks = re.findall(
            r"<(?:rect|circle|path) [^>]*%[^>]*class=[^>]*>", text.partition('class="page"')[2]
        )
        assert all(mark in page for mark in marks), picture.name
        assert marks or picture.name == "links", picture.name


def test_intervals_are_drawn(outcome, reports: ModuleType, tmp_path: Path) -> None:
    """The same report with and without them: whiskers make the pictures differ."""
    for name in ("plot", "prediction"):
        drawn = []
        for interval_s in (None, (2.3, 2.45)):
            report = reports.make_report(
                [outcome("even", interval_s=interval_s, steps_s=[9.0, 2.4, 2.5, 2.6])]
            )
            picture = next(file for file in picture_files(report) if file.name == name)
            drawn.append(write_svg(tmp_path / picture.file, *picture.groups).read_bytes())
        assert drawn[0] != drawn[1]


def test_sixteen_long_names_with_odd_signs(outcome, reports: ModuleType, tmp_path: Path) -> None:
    devices = [f"Büro-$x_{i}$-工作站-{'long' * 9}/cuda:{i}" for i in range(16)]
    many = outcome(devices=devices, counts=[1] * 16, compute_s=[0.1] * 16, step_s=0.5)
    for picture in picture_files(reports.make_report([many])):
        width, height = _size(write_svg(tmp_path / picture.file, *picture.groups))
        assert width == 1000
        assert height > 500 or picture.name not in ("plot", "steps", "cluster")


@pytest.mark.parametrize("case", ["nothing", "one device", "only infeasible", "mixed", "zeros"])
def test_edges(case: str, outcome, reports: ModuleType, tmp_path: Path) -> None:
    none = StrategyOutcome("even", None, "needs 3.1 GiB, has 2.0 GiB " * 20)
    cases = {
        "nothing": [],
        "one device": [outcome(devices=("a/cpu:0",), counts=(12,), compute_s=(2.0,), steps_s=[2.0, 2.1])],
        "only infeasible": [none],
        "mixed": [none, outcome("optimal", steps_s=[3.0, 2.0])],
        "zeros": [outcome(compute_s=(0.0, 0.0), step_s=0.0)],
    }
    report = reports.make_report(cases[case], full=case not in ("nothing", "only infeasible"))
    for picture in picture_files(report):
        _size(write_svg(tmp_path / picture.file, *picture.groups))


def test_same_figures_same_bytes(three, reports: ModuleType, tmp_path: Path) -> None:
    picture = picture_files(reports.make_report(three))[0]
    first, second = (write_svg(tmp_path / name, *picture.groups) for name in ("a.svg", "b.svg"))
    assert first.read_bytes() == second.read_bytes()


def test_a_measured_step_above_the_simulated_one(traces: ModuleType, tmp_path: Path) -> None:
    drawing = plot_trace(*traces.two_timelines(), tmp_path / "trace.svg")
    measured, simulated = traces.two_timelines()
    assert _size(drawing)[0] == 1000
    assert drawing.read_bytes() == plot_trace(measured, simulated, tmp_path / "again.svg").read_bytes()


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (4, 8), (48, 24)])
def test_traces_of_few_and_many_stages(stages: int, microbatches: int, tmp_path: Path) -> None:
    devices = [f"Büro-$x_{i}$-{'long' * 9}/cuda:{i}" for i in range(stages)]
    line = simulated_timeline(_play(stages, microbatches), devices)
    width, height = _size(plot_trace(line, line, tmp_path / "trace.svg"))
    assert width == 1000
    assert height <= 200 + 2 * 24 * stages


def test_a_step_of_no_time(tmp_path: Path) -> None:
    play = SimulationInput("1f1b", 1, (1,), (0,), (StageTimes(0.0, 0.0),), ())
    line = simulated_timeline(play, ["n/cpu:0"])
    _size(plot_trace(line, line, tmp_path / "trace.svg"))


def test_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(SkyctlError, match="No such file"):
        write_svg(tmp_path / "not there" / "losses.svg", ChartGroup(()))


def test_the_colours_are_those_of_the_style_sheet_in_the_light() -> None:
    assert ".predicted{fill:#56b4e9}" in style()
    assert ".ring{fill:#ffffff;stroke:#56b4e9" in style()


def test_names_are_text_and_never_markup(outcome, reports: ModuleType, tmp_path: Path) -> None:
    devices = ("<script>alert(1)</script>&amp;\"'/cpu:0", "b\x07\u202e-->/cpu:0")
    report = reports.make_report([outcome(devices=devices, counts=(6, 6), compute_s=(1.0, 1.0))])
    for picture in picture_files(report):
        _size(write_svg(tmp_path / picture.file, *picture.groups))


def test_names_that_fit() -> None:
    long = "workstation-0.lab.example.org"
    assert device_names([long, long.replace("0", "1")]) == {
        long: "workstation-0",
        long.replace("0", "1"): "workstation-1",
    }
    twins = ["box.a.a-long-domain.example/cuda:0", "box.b.a-long-domain.example/cuda:0"]
    assert all(len(name) <= 22 for name in device_names(twins).values())
    assert device_names(["192.0.2.10", "a" * 40])["192.0.2.10"] == "192.0.2.10"
    assert shortened("abc\ndef") == "abc·def"
