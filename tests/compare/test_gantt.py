from __future__ import annotations

import struct
import sys
from pathlib import Path
from types import ModuleType

import pytest

from skyctl.compare.gantt import plot_trace
from skyctl.compare.timeline import simulated
from skyctl.errors import SkyctlError
from skyctl.schedule.playing import Play
from skyctl.schedule.simulate import Boundary, Hop, StageTimes

pytest.importorskip("matplotlib")


def _size(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", head[16:24])
    return width, height


def _play(stages: int, microbatches: int, schedule: str = "zero-bubble") -> Play:
    flying = tuple(min(microbatches, stages - s) for s in range(stages))
    hop = Hop(0.1, 0.01)
    times = (StageTimes(1.0, 2.0, 0.5, 0.9),) * stages
    return Play(schedule, microbatches, flying, (0,) * stages, times, (Boundary(hop, hop),) * (stages - 1))


def test_a_measured_step_above_the_simulated_one(traces: ModuleType, tmp_path: Path) -> None:
    path = plot_trace(*traces.two_timelines(), tmp_path / "trace.png")
    assert _size(path) == (2000, round(200 * (0.34 + 2 * (0.36 + 2 * 0.3) + 0.48)))
    assert path.read_bytes() == plot_trace(*traces.two_timelines(), tmp_path / "again.png").read_bytes()


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (4, 8), (48, 24)])
def test_few_and_many(stages: int, microbatches: int, tmp_path: Path) -> None:
    devices = [f"Büro-$x_{i}$-{'long' * 9}/cuda:{i}" for i in range(stages)]
    line = simulated(_play(stages, microbatches), devices)
    width, height = _size(plot_trace(line, line, tmp_path / "trace.png"))
    assert width == 2000
    assert height <= 200 * 16


def test_a_step_of_no_time(tmp_path: Path) -> None:
    line = simulated(Play("1f1b", 1, (1,), (0,), (StageTimes(0.0, 0.0),), ()), ["n/cpu:0"])
    _size(plot_trace(line, line, tmp_path / "trace.png"))


def test_without_matplotlib(traces: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SkyctlError, match="matplotlib"):
        plot_trace(*traces.two_timelines(), tmp_path / "trace.png")
    assert not (tmp_path / "trace.png").exists()
