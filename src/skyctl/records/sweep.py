"""A sweep as its folder keeps it: what was asked for, and where each trial stands."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import Field

from skyctl.records.base import Count, FileRecord, Index, Name, Record, Seconds, Seq
from skyctl.records.script_request import ScriptRequest

TrialStatus = Literal["waiting", "running", "done", "failed", "stopped"]
SweepMode = Literal["min", "max"]
SWEEP_MODES: tuple[SweepMode, ...] = get_args(SweepMode)
StopRule = Literal["median"]
STOP_RULES: tuple[StopRule, ...] = get_args(StopRule)
KEPT: tuple[TrialStatus, ...] = ("done", "stopped")
"""Trials that have ended for good; ``--resume`` runs all others."""


class Choice(Record):
    """A parameter that takes one of these values, as they were typed."""

    values: Seq[str] = Field(min_length=1)


class Range(Record):
    """A parameter drawn from ``low`` to ``high``; ``log``: evenly by its logarithm; ``whole``: integers."""

    low: float
    high: float
    log: bool = False
    whole: bool = False


class SweepRequest(FileRecord):
    """``sweep.json``: what a sweep was asked for.

    Attributes:
        cluster: the name in the cluster file; ``cluster_file``: its absolute path.
        script: the script without a trial's parameters. Its ``ranks`` are, by node, the trials at once.
        files: by name, the SHA-256 of each file that was sent.
        metric: the key of the figure in what the script reports; None: trials are not compared.
        stop: the rule that ends trials early; None: none does. ``grace``: reports before it looks at a trial.
        trials: how many there are in the end.
        space: what ``--random`` draws from; empty: all trials are given.
        optuna: Optuna's sampler draws.
    """

    kind: Literal["skyctl/sweep"] = "skyctl/sweep"
    version: Literal[1] = 1
    sweep_id: Name
    created: str
    cluster: Name
    cluster_file: str
    script: ScriptRequest
    files: dict[str, str]
    metric: Name | None = None
    mode: SweepMode = "min"
    stop: StopRule | None = None
    grace: Count = 5
    per_device: Count = 1
    trials: Count
    seed: int = 0
    space: dict[str, Choice | Range] = Field(default_factory=dict)
    optuna: bool = False


class TrialState(FileRecord):
    """``trials/NNNN.json``: a trial, and how far it is.

    Attributes:
        number: from 1.
        parameters: by name, the values as the script gets them.
        device: where it runs, or ran last.
        seconds: from its process's start to its end.
        returncode: the process's exit status (negative: a signal); None: it has not ended by itself.
        value: the last figure that it reported; None: none, or no finite number.
        step: of that report.
        reports: how many figures it reported.
        why: for people, why it failed or was stopped.
    """

    kind: Literal["skyctl/trial"] = "skyctl/trial"
    version: Literal[1] = 1
    number: Count
    parameters: dict[str, str]
    status: TrialStatus = "waiting"
    device: str | None = None
    began: str | None = None
    ended: str | None = None
    seconds: Seconds | None = None
    returncode: int | None = None
    value: float | None = None
    step: Index | None = None
    reports: Index = 0
    why: str | None = None


def best_trial(trials: Seq[TrialState], mode: SweepMode) -> TrialState | None:
    """The trial that is done and has the best figure, of equals the first; None: none has one."""
    compared = [trial for trial in trials if trial.status == "done" and trial.value is not None]
    sign = 1 if mode == "min" else -1
    return min(compared, key=lambda trial: (sign * (trial.value or 0.0), trial.number), default=None)
