"""A trial while its process is on a node: what has come of it, and how it ended."""

from __future__ import annotations

import math
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from skyctl.records.base import timestamp
from skyctl.records.sweep import TrialState, TrialStatus
from skyctl.remote.remote_task import RemoteTask
from skyctl.run.scripts.script_failure import ScriptRankState
from skyctl.run.scripts.script_ranks import ScriptRank
from skyctl.sweep.metric_reports import LearningCurves, read_report
from skyctl.sweep.sweep_folder import log_error, open_log
from skyctl.sweep.trial_devices import TrialDevice

SHOWN_CHARS = 300
"""Of a failed trial's last line."""


def only_rank(node: str) -> ScriptRank:
    """A trial as the one rank of a script."""
    return ScriptRank(0, node, 0, 1, 0, 1, 1)


def workplace_name(number: int) -> str:
    """A trial's copy of the shipped files, in the folder of its node's session."""
    return f"trial-{number:04d}"


@dataclass
class RunningTrial:
    """A trial on its device.

    Attributes:
        task: its process; None: it could not even be asked for.
        heard: what its process has said.
        ending: why it is being ended, and what it counts as then; None: nobody ends it.
    """

    trial: TrialState
    device: TrialDevice
    log: Path
    task: RemoteTask | None = None
    ending: tuple[TrialStatus, str] | None = None
    heard: ScriptRankState = field(init=False)
    _log: BinaryIO = field(init=False)
    _started_at: float | None = None
    _seconds: float | None = None

    def __post_init__(self) -> None:
        self.heard = ScriptRankState(only_rank(self.device.node))
        self._log = open_log(self.log)

    @property
    def number(self) -> int:
        """The trial's number."""
        return self.trial.number

    def began(self) -> None:
        """Its process runs."""
        self.heard.started = True
        self._started_at = time.monotonic()

    def ended(self) -> None:
        """Its process has ended. Idempotent."""
        if self._started_at is not None and self._seconds is None:
            self._seconds = time.monotonic() - self._started_at

    def read_lines(self, lines: list[str], metric: str | None, curves: LearningCurves) -> bool:
        """Keeps what it printed; whether it has reported a figure.

        Raises:
            SkyctlError: its log can't be written.
        """
        try:
            self._log.write("".join(f"{line}\n" for line in lines).encode(errors="replace"))
        except OSError as exc:
            raise log_error(self.log, exc) from exc
        if metric is None or self.ending is not None:
            return False
        reports = [report for line in lines if (report := read_report(line, metric)) is not None]
        for report in reports:
            step = curves.add(self.number, report)
            value = report.value if math.isfinite(report.value) else None
            update = {"value": value, "step": step, "reports": self.trial.reports + 1}
            self.trial = self.trial.model_copy(update=update)
        return bool(reports)

    def close(self) -> None:
        """Nothing more of it is kept. Idempotent."""
        self._log.close()

    def final(self) -> TrialState:
        """The trial as it has ended."""
        self.ended()
        status, why = self._verdict()
        # A process that is ended says so in time or not: its status would be chance, and nothing of its own.
        result = self.heard.result if self.ending is None else None
        return self.trial.model_copy(
            update={
                "status": status,
                "why": why,
                "ended": timestamp(),
                "seconds": self._seconds,
                "returncode": None if result is None else result.returncode,
            }
        )

    def _verdict(self) -> tuple[TrialStatus, str | None]:
        if self.ending is not None:  # even with exit status 0: a script may end well at SIGTERM
            return self.ending
        result = self.heard.result
        if result is not None and result.returncode == 0:
            return "done", None
        last = next((line.strip() for line in reversed(self.heard.tail) if line.strip()), "")
        said = f": {last[:SHOWN_CHARS]}" if last else ""
        if result is None:
            return "failed", f"its process gave no result{said}"
        if result.returncode > 0:
            return "failed", f"exit status {result.returncode}{said}"
        try:
            name = signal.Signals(-result.returncode).name
        except ValueError:
            name = f"signal {-result.returncode}"
        return "failed", f"ended by {name}{said}"
