"""metrics.jsonl and TensorBoard's events, as steps end."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from skyctl.errors import SkyctlError
from skyctl.files import RunPaths
from skyctl.launch.events import Collected, Progress, Watcher
from skyctl.launch.metrics import Metrics


def progress(step: int, **more: float) -> Progress:
    return Progress(
        step=step, steps=3, loss=2.0 - step, iteration_s=0.5, samples_per_s=8.0, left_s=None, **more
    )


def test_a_line_a_step_readable_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    notes: list[str] = []
    seen: list[int] = []
    paths = RunPaths.new()
    metrics = Metrics(paths, notes.append)
    watcher = metrics.beside(Watcher(step=lambda p: seen.append(p.step)))
    assert not paths.metrics.exists()
    watcher.step(progress(0, learning_rate=0.1))
    first = {"step": 0, "loss": 2.0, "learning_rate": 0.1, "iteration_s": 0.5, "samples_per_s": 8.0}
    assert json.loads(paths.metrics.read_text()) == first
    watcher.step(progress(1, grad_norm=3.0, validation_loss=1.5))
    metrics.close()
    metrics.close()
    lines = [json.loads(line) for line in paths.metrics.read_text().splitlines()]
    assert lines[1]["grad_norm"] == 3.0
    assert lines[1]["validation_loss"] == 1.5
    assert seen == [0, 1]
    assert notes == ["no TensorBoard events: it is not installed (pip install 'skyctl[tensorboard]')"]
    assert not paths.tensorboard.exists()


def test_tensorboard_gets_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    paths = RunPaths.new()
    metrics = Metrics(paths, pytest.fail)
    watcher = metrics.beside(Watcher())
    watcher.step(progress(0))
    watcher.step(progress(1, validation_loss=1.5))
    (events,) = paths.tensorboard.iterdir()
    found = {
        (value.tag, event.step)
        for event in EventFileLoader(str(events)).Load()
        for value in event.summary.value
    }
    assert {("loss", 0), ("loss", 1), ("validation_loss", 1), ("samples_per_s", 1)} <= found
    assert ("validation_loss", 0) not in found
    metrics.close()


def test_a_file_that_cannot_be_written_is_said() -> None:
    paths = RunPaths.new()
    paths.metrics.mkdir()
    metrics = Metrics(paths, lambda _text: None)
    with pytest.raises(SkyctlError, match=r"cannot write the run's figures to .*metrics\.jsonl"):
        metrics.step(progress(0))
    metrics.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk_is_said_once() -> None:
    metrics = Metrics(RunPaths.new(), lambda _text: None)
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        metrics._lines = full
        with pytest.raises(SkyctlError, match="No space left on device"):
            metrics.step(progress(0))
        metrics.close()


def event(step: int, **more: object) -> dict[str, object]:
    return {"step": step, "iteration_s": 0.1, "loss": 1.0, "samples": 4, "validates": False, **more}


def test_a_step_has_ended_when_its_validation_has() -> None:
    collected = Collected(ranks=2, steps=3)
    collected.add(0, event(0, learning_rate=None, grad_norm=2.0, validates=True))
    collected.add(1, event(0, learning_rate=0.3, validates=True))
    collected.add(0, event(1))
    collected.add(1, event(1))
    assert collected.complete() == []
    collected.validation[0] = 0.7
    first, second = collected.complete()
    assert (first.validation_loss, first.learning_rate, first.grad_norm) == (0.7, 0.3, 2.0)
    assert (second.validation_loss, second.learning_rate, second.grad_norm) == (None, None, None)


def test_what_is_known_of_steps_that_a_silent_rank_has_not_told_of() -> None:
    collected = Collected(ranks=3, steps=9)
    for step in range(6):
        for rank in (0, 2) if step else (0, 1, 2):
            collected.add(rank, event(step, loss=float(step)))
    assert [one.step for one in collected.complete()] == [0]
    assert [(one.step, one.loss) for one in collected.heard(5)] == [(n, float(n)) for n in range(1, 5)]
    assert [one.step for one in collected.heard(9)] == [1, 2, 3, 4, 5]
    del collected.by_rank[2][3]
    assert [one.step for one in collected.heard(9)] == [1, 2]
