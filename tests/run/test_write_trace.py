"""A trace is written beside a run that is already done: whatever fails here is a note."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skyctl.compare.timeline import simulated_timeline
from skyctl.errors import SkyctlError
from skyctl.files import RunPaths
from skyctl.run import artifacts
from skyctl.run.artifacts import write_trace
from skyctl.run.callbacks import RunCallbacks
from skyctl.schedule.simulation_input import SimulationInput
from skyctl.schedule.step_times import StageTimes
from skyctl.worker.rank_events import RankResult

from ..helpers.orders import rank_spec

PLAY = SimulationInput("1f1b", 1, (1,), (0,), (StageTimes(1.0, 1.0),), ())
RECORD = {
    "clocks": {},
    "steps": [{"step": 0, "start_s": 5.0, "end_s": 7.5, "spans": [["F", 0, 5.0, 6.0], ["B", 0, 6.0, 7.0]]}],
}


def write(record: Any, notes: list[str]) -> tuple[str | None, RunPaths]:
    paths = RunPaths.new()
    spec = rank_spec(0, "n1")
    results = {0: RankResult(1, trace="/t")} if record else {}
    state: Any = SimpleNamespace(specs=[spec], results=results)
    sessions: Any = {
        "n1": SimpleNamespace(fetch=lambda _remote, local, _most: local.write_text(json.dumps(record)))
    }
    watcher = RunCallbacks(note=notes.append)
    simulated = simulated_timeline(PLAY, ["n1/cpu:0"])
    return write_trace(state, paths, sessions, simulated, watcher), paths


def test_a_file_and_a_picture() -> None:
    notes: list[str] = []
    path, paths = write(RECORD, notes)
    assert notes == []
    assert path == str(paths.trace)
    slices = [e for e in json.loads(Path(path).read_text())["traceEvents"] if e["ph"] == "X"]
    assert [(e["pid"], e["ts"], e["dur"]) for e in slices] == [
        (1, 0.0, 1e6),
        (1, 1e6, 1e6),
        (2, 0.0, 1e6),
        (2, 1e6, 1e6),
    ]
    assert paths.trace_picture.read_text().startswith("<svg ")


def test_a_picture_that_cannot_be_written_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise SkyctlError("no space left on the disk")

    monkeypatch.setattr(artifacts, "plot_trace", refuse)
    notes: list[str] = []
    path, paths = write(RECORD, notes)
    assert path == str(paths.trace)
    assert not paths.trace_picture.exists()
    (note,) = notes
    assert note == "no picture of the trace: no space left on the disk"


def test_a_rank_without_a_record_costs_the_trace_only() -> None:
    notes: list[str] = []
    path, paths = write(None, notes)
    assert path is None
    assert notes == ["no trace: rank 0 on n1/cpu:0 recorded nothing"]
    assert not paths.trace.exists()
