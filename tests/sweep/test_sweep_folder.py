"""A sweep's folder after a process that was cut short at any point."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from skyctl.errors import InputError
from skyctl.records.sweep import SweepMode, TrialState, TrialStatus, best_trial
from skyctl.sweep.sweep_folder import SweepFolder


def trial(number: int, value: float | None = 1.0, status: TrialStatus = "done") -> TrialState:
    return TrialState(number=number, parameters={"x": "1"}, status=status, value=value)


@pytest.fixture
def folder(tmp_path: Path) -> SweepFolder:
    return SweepFolder(tmp_path)


def fetch(folder: SweepFolder, number: int, *, is_whole: bool = True) -> None:
    (folder.clear_next_best() / "model.txt").write_text(str(number))
    if is_whole:
        folder.note_next_best(trial(number), "loss")


def best(folder: SweepFolder) -> tuple[int, str] | None:
    if not folder.best.exists():
        return None
    said = json.loads((folder.best / "best.json").read_text())
    return said["number"], (folder.best / "files" / "model.txt").read_text()


def test_the_next_best_takes_the_place_of_the_last(folder: SweepFolder) -> None:
    for number in (1, 2):
        fetch(folder, number)
        folder.settle_best([trial(number)])
        assert best(folder) == (number, str(number))
    assert sorted(path.name for path in folder.folder.iterdir()) == ["best"]


@pytest.mark.parametrize(
    ("is_whole", "status", "expected"),
    [(True, "done", 2), (True, "running", 1), (False, "done", 1), (True, "waiting", 1)],
)
def test_what_was_cut_short_is_ended_or_dropped(
    folder: SweepFolder, is_whole: bool, status: TrialStatus, expected: int
) -> None:
    fetch(folder, 1)
    folder.settle_best([trial(1)])
    fetch(folder, 2, is_whole=is_whole)
    folder.settle_best([trial(1), trial(2, status=status)])
    assert best(folder) == (expected, str(expected))
    assert not folder.next_best.exists()


def test_a_best_that_was_being_replaced_is_kept(folder: SweepFolder) -> None:
    fetch(folder, 1)
    folder.settle_best([trial(1)])
    folder.best.rename(folder.folder / "best.old")
    folder.settle_best([trial(1)])
    assert best(folder) == (1, "1")


@pytest.mark.parametrize(("mode", "expected"), [("min", 2), ("max", 1)])
def test_the_best_is_done_and_has_a_figure(mode: SweepMode, expected: int) -> None:
    trials = (trial(1, 3.0), trial(2, 1.0), trial(3, 1.0), trial(4, None), trial(5, 9.0, "stopped"))
    found = best_trial((*trials, trial(6, -9.0, "failed")), mode)
    assert found is not None
    assert found.number == expected
    assert best_trial((trial(4, None),), mode) is None


def test_a_sweep_is_found_by_a_part_of_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYCTL_HOME", str(tmp_path))
    for name in ("20260101-000000-aaaa", "20260102-000000-bbbb"):
        (tmp_path / "sweeps" / name).mkdir(parents=True)
        (tmp_path / "sweeps" / name / "sweep.json").write_text("{}")
    assert SweepFolder.find("bbbb").sweep_id == "20260102-000000-bbbb"
    assert SweepFolder.find("20260101").sweep_id == "20260101-000000-aaaa"
    with pytest.raises(InputError, match="may be any of 2 sweeps"):
        SweepFolder.find("2026")
    for name in ("", "cccc"):
        with pytest.raises(InputError, match="there is no sweep"):
            SweepFolder.find(name)
