"""Charts as PNG files: sizes, odd names, nothing to draw, no matplotlib."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from skyctl.compare.charts.chart import ChartGroup
from skyctl.compare.charts.matplotlib_canvas import device_names, shortened
from skyctl.compare.charts.picture_files import picture_files
from skyctl.compare.charts.png import STYLE, colours, write_png
from skyctl.compare.charts.timeline_charts import plot_trace
from skyctl.compare.outcome import StrategyOutcome
from skyctl.compare.timeline import simulated_timeline
from skyctl.errors import SkyctlError
from skyctl.schedule.simulation import BoundaryTimes, MessageTimes, StageTimes
from skyctl.schedule.simulation_input import SimulationInput

pytest.importorskip("matplotlib")


def _size(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", head[16:24])
    return width, height


def _play(stages: int, microbatches: int, schedule: str = "zero-bubble") -> SimulationInput:
    in_flight = tuple(min(microbatches, stages - s) for s in range(stages))
    message = MessageTimes(0.1, 0.01)
    times = (StageTimes(1.0, 2.0, 0.5, 0.9),) * stages
    boundaries = (BoundaryTimes(message, message),) * (stages - 1)
    return SimulationInput(schedule, microbatches, in_flight, (0,) * stages, times, boundaries)


def test_every_picture_of_a_report_is_drawn(three, reports: ModuleType, tmp_path: Path) -> None:
    drawn = {}
    for picture in picture_files(reports.made(three, full=True)):
        drawn[picture.name] = path = write_png(tmp_path / picture.file, *picture.groups)
        assert _size(path)[0] == 2000
        assert path.stat().st_size > 8_000, path
    assert list(drawn) == [
        "plot", "cluster", "links", "steps", "bound", "prediction", "losses",
        "microbatches sweep", "nodes sweep",
    ]  # fmt: skip


def test_intervals_are_drawn(outcome, reports: ModuleType, tmp_path: Path) -> None:
    """The same report with and without them: whiskers make the pictures differ."""
    for name in ("plot", "prediction"):
        drawn = []
        for interval_s in (None, (2.3, 2.45)):
            made = reports.made([outcome("even", interval_s=interval_s, steps_s=[9.0, 2.4, 2.5, 2.6])])
            picture = next(one for one in picture_files(made) if one.name == name)
            drawn.append(write_png(tmp_path / picture.file, *picture.groups).read_bytes())
        assert drawn[0] != drawn[1]


def test_sixteen_long_names_with_odd_signs(outcome, reports: ModuleType, tmp_path: Path) -> None:
    devices = [f"Büro-$x_{i}$-工作站-{'long' * 9}/cuda:{i}" for i in range(16)]
    many = outcome(devices=devices, counts=[1] * 16, compute_s=[0.1] * 16, step_s=0.5)
    for picture in picture_files(reports.made([many])):
        width, height = _size(write_png(tmp_path / picture.file, *picture.groups))
        assert width == 2000
        assert height > 1000 or picture.name not in ("plot", "steps", "cluster")


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
    report = reports.made(cases[case], full=case not in ("nothing", "only infeasible"))
    for picture in picture_files(report):
        _size(write_png(tmp_path / picture.file, *picture.groups))


def test_same_figures_same_bytes(three, reports: ModuleType, tmp_path: Path) -> None:
    picture = picture_files(reports.made(three))[0]
    first, second = (write_png(tmp_path / name, *picture.groups) for name in ("a.png", "b.png"))
    assert first.read_bytes() == second.read_bytes()


def test_a_measured_step_above_the_simulated_one(traces: ModuleType, tmp_path: Path) -> None:
    one = plot_trace(*traces.two_timelines(), tmp_path / "trace.png")
    measured, simulated = traces.two_timelines()
    assert _size(one)[0] == 2000
    assert _size(one)[1] > _size(plot_trace(simulated, simulated, tmp_path / "other.png"))[1] - 40
    assert one.read_bytes() == plot_trace(measured, simulated, tmp_path / "again.png").read_bytes()


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (4, 8), (48, 24)])
def test_traces_of_few_and_many_stages(stages: int, microbatches: int, tmp_path: Path) -> None:
    devices = [f"Büro-$x_{i}$-{'long' * 9}/cuda:{i}" for i in range(stages)]
    line = simulated_timeline(_play(stages, microbatches), devices)
    width, height = _size(plot_trace(line, line, tmp_path / "trace.png"))
    assert width == 2000
    assert height <= 200 * 16


def test_a_step_of_no_time(tmp_path: Path) -> None:
    play = SimulationInput("1f1b", 1, (1,), (0,), (StageTimes(0.0, 0.0),), ())
    line = simulated_timeline(play, ["n/cpu:0"])
    _size(plot_trace(line, line, tmp_path / "trace.png"))


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SkyctlError, match="matplotlib") as caught:
        write_png(tmp_path / "steps.png", ChartGroup(()))
    assert caught.value.hint == "pip install 'skyctl[plots]'"
    assert not (tmp_path / "steps.png").exists()


def test_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(SkyctlError, match="No such file"):
        write_png(tmp_path / "not there" / "losses.png", ChartGroup(()))


def test_importing_draws_in_no_matplotlib() -> None:
    code = "import sys, skyctl.compare.charts.png, skyctl.compare.comparison;"
    code += "sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_colours_are_those_of_the_style_sheet_in_the_light() -> None:
    assert "--predicted:#56b4e9" in STYLE.read_text(encoding="utf-8")
    assert colours()["predicted"] == "#56b4e9"
    assert colours()["whisker on"] == colours()["measured"] == "#d55e00"
    assert colours()["ring"] == colours()["predicted"]
    assert colours()["paper"] == "#ffffff"


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
