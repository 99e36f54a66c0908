"""The files that a run without another supervisor writes: logs, metrics.jsonl and TensorBoard's events."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skyctl.errors import SkyctlError
from skyctl.files import RunPaths
from skyctl.records.base import timestamp
from skyctl.records.measurement import ValidationMeasurement
from skyctl.records.run_state import RunState
from skyctl.run.callbacks import StepProgress
from skyctl.run.journal import FolderJournal

VALIDATION = ValidationMeasurement(step=1, loss=1.5, metrics={"top-5": 0.5, "odd": None})


def progress(step: int, **more: Any) -> StepProgress:
    return StepProgress(
        step=step, steps=3, loss=2.0 - step, iteration_s=0.5, samples_per_s=8.0, left_s=None, **more
    )


def sink(note: Callable[[str], None]) -> FolderJournal:
    paths = RunPaths.new()
    now = timestamp()
    state = RunState(run_id=paths.run_id, created=now, written=now, workload="w", cluster="c", steps=3)
    return FolderJournal(paths, state, note)


def test_a_line_a_step_readable_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    notes: list[str] = []
    written = sink(notes.append)
    paths = written.paths
    assert not paths.metrics.exists()
    written.step(progress(0, learning_rate=0.1))
    first = {"step": 0, "loss": 2.0, "learning_rate": 0.1, "iteration_s": 0.5, "samples_per_s": 8.0}
    assert json.loads(paths.metrics.read_text()) == first
    written.step(progress(1, grad_norm=3.0, validation=VALIDATION))
    written.close()
    written.close()
    lines = [json.loads(line) for line in paths.metrics.read_text().splitlines()]
    assert lines[1]["grad_norm"] == 3.0
    assert (lines[1]["validation_loss"], lines[1]["validation_metrics"]) == (1.5, {"top-5": 0.5, "odd": None})
    assert notes == ["no TensorBoard events: it is not installed (pip install 'skyctl[tensorboard]')"]
    assert not paths.tensorboard.exists()


def test_what_is_heard_is_done_with(monkeypatch: pytest.MonkeyPatch) -> None:
    class Session:
        def __init__(self) -> None:
            self.done: list[int] = []

        def acknowledge(self, seq: int) -> None:
            self.done.append(seq)

    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    paths, session = RunPaths.new(), Session()
    now = timestamp()
    state = RunState(run_id=paths.run_id, created=now, written=now, workload="w", cluster="c", steps=3)
    written = FolderJournal(paths, state, lambda _note: None, {"a": session})
    written.heard("a", "rank-0", {"event": "ready", "seq": 7})
    written.heard("a", "rank-0", {"event": "alive"})
    written.heard("b", "rank-1", {"event": "ready", "seq": 8})
    assert session.done == [7]


def test_tensorboard_gets_the_same() -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    written = sink(pytest.fail)
    written.step(progress(0))
    written.step(progress(1, validation=VALIDATION))
    (events,) = written.paths.tensorboard.iterdir()
    found = {
        (value.tag, event.step)
        for event in EventFileLoader(str(events)).Load()
        for value in event.summary.value
    }
    assert {("loss", 0), ("loss", 1), ("validation_loss", 1), ("samples_per_s", 1)} <= found
    assert ("validation/top-5", 1) in found
    assert not {("validation_loss", 0), ("validation/odd", 1)} & found
    written.close()


def test_tensorboard_hides_steps_that_a_later_process_does_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer import event_file_writer

    # Files of one second and process are read by their number as text: 10 would come before 9.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    first = sink(pytest.fail)
    for step in range(3):
        first.step(progress(step))
    first.close()
    again = FolderJournal(first.paths, first.state, pytest.fail)
    again.step(progress(1))
    again.close()
    read = EventAccumulator(str(first.paths.tensorboard))
    read.Reload()
    assert [(one.step, one.value) for one in read.Scalars("loss")] == [(0, 2.0), (1, 1.0)]


def test_what_ranks_print_and_die_of_is_in_their_logs() -> None:
    written = sink(lambda _text: None)
    assert written.heard("a", "rank-1", {"event": "log", "text": "one\ntwo"})
    assert written.heard("a", "rank-1", {"event": "error", "traceback": "Traceback: x"})
    assert written.heard("a", "keeper", {"event": "log", "text": "nobody's"})
    assert written.paths.log(1).read_text() == "one\ntwo\nTraceback: x\n"
    written.close()


def test_a_file_that_cannot_be_written_is_said() -> None:
    written = sink(lambda _text: None)
    written.paths.metrics.mkdir()
    with pytest.raises(SkyctlError, match=r"cannot write the run's figures to .*metrics\.jsonl"):
        written.step(progress(0))
    written.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk_is_said() -> None:
    written = sink(lambda _text: None)
    written.paths.metrics.symlink_to("/dev/full")
    with pytest.raises(SkyctlError, match="No space left on device"):
        written.step(progress(0))
    written.close()
