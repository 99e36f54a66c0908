"""The final state of a trial, by how its process ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyctl.errors import SkyctlError
from skyctl.records.sweep import TrialState, TrialStatus
from skyctl.script.script_events import ScriptResult
from skyctl.sweep.metric_reports import LearningCurves
from skyctl.sweep.running_trial import RunningTrial
from skyctl.sweep.trial_devices import TrialDevice

ENDING: tuple[TrialStatus, str] = ("stopped", "too slow")


def running(log: Path) -> RunningTrial:
    return RunningTrial(TrialState(number=1, parameters={}), TrialDevice("a/cpu:0", "a", 1.0), log)


@pytest.mark.parametrize(
    ("returncode", "is_ended", "status", "why"),
    [
        (0, False, "done", None),
        (0, True, "stopped", "too slow"),
        (3, False, "failed", "exit status 3: last"),
        (-9, False, "failed", "ended by SIGKILL: last"),
        (-15, True, "stopped", "too slow"),
        (-200, False, "failed", "ended by signal 200: last"),
        (None, False, "failed", "its process gave no result: last"),
        (None, True, "stopped", "too slow"),
    ],
)
def test_verdicts(
    returncode: int | None, is_ended: bool, status: TrialStatus, why: str | None, tmp_path: Path
) -> None:
    trial = running(tmp_path / "log")
    trial.began()
    trial.heard.tail = ["first", "last ", " "]
    trial.heard.result = None if returncode is None else ScriptResult(returncode)
    trial.ending = ENDING if is_ended else None
    trial.close()
    final = trial.final()
    assert (final.status, final.why) == (status, why)
    assert final.returncode == (None if is_ended else returncode)
    assert final.seconds is not None


def test_figures_are_kept_until_it_is_ended(tmp_path: Path) -> None:
    trial, curves = running(tmp_path / "log"), LearningCurves("min", 1)
    assert trial.read_lines(['{"loss": 2}', "é\udcff", '{"loss": 1, "step": 7}'], "loss", curves)
    assert (trial.trial.value, trial.trial.step, trial.trial.reports) == (1.0, 7, 2)
    assert trial.read_lines(['{"loss": NaN}'], "loss", curves)
    assert (trial.trial.value, trial.trial.reports) == (None, 3)
    trial.ending = ENDING
    assert not trial.read_lines(['{"loss": 0}'], "loss", curves)
    trial.close()
    assert trial.trial.reports == 3
    assert (tmp_path / "log").read_text().splitlines()[1] == "é?"


def test_a_full_disk_is_said() -> None:
    trial = running(Path("/dev/full"))
    with pytest.raises(SkyctlError, match="can't write /dev/full: No space left"):
        trial.read_lines(["a line"], None, LearningCurves("min", 1))
    trial.close()
