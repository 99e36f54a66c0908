"""The records that are written of a run: logs, figures (``metrics.jsonl``, TensorBoard) and its state.

A run tells its ``Journal`` everything it hears, in order, before anything is done about it. There are two:
``FolderJournal``, plain files of a run that ends with its process, and ``supervision.run_journal``, which
another process can go on with at any instant.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from skyctl.errors import SkyctlError
from skyctl.files import RunPaths, json_line
from skyctl.records.base import timestamp
from skyctl.records.measurement import ValidationMeasurement
from skyctl.records.plan import Plan
from skyctl.records.run_state import RunAttempt, RunState
from skyctl.run.callbacks import StepProgress
from skyctl.run.log_limits import LogLimits
from skyctl.run.owner_figures import owner_lines
from skyctl.run.rank_spec import rank_of_task

DISK_HINT = "free some space, or set SKYCTL_HOME to another disk"
_SCALARS = ("loss", "validation_loss", "learning_rate", "grad_norm", "iteration_s", "samples_per_s")


class Acknowledging(Protocol):
    """The part of a session (``remote.agent_session``) that a sink needs; it keeps its numbered events."""

    def acknowledge(self, seq: int) -> None:
        """The event of that number is handled: the node may forget it."""


EventHistory = Iterable[tuple[int, dict[str, Any]]]
"""(rank, message) of an earlier process, in the order in which it wrote them down; read once."""


class Journal(Protocol):
    """Called from the supervising thread only. It raises SkyctlError if it can't write."""

    paths: RunPaths
    """The files of the attempt under way."""
    state: RunState
    """The run's state as last told."""

    def begin(self, paths: RunPaths, plan: str | None) -> None:
        """A new attempt, whose folder is there; ``plan``: its JSON, None where it has none."""

    def heard(self, node: str, who: str, event: Mapping[str, Any]) -> bool:
        """An event of a task (``rank-3``, ``keeper``), before anything is done about it.

        Returns:
            False where it was written down before, so that nothing must be done about it again.
        """

    def step(self, progress: StepProgress) -> None:
        """A step that every rank has finished; for a step that is done again, once more."""

    def update(self, **changes: Any) -> None:
        """Changes fields of ``state``, by name. Raises SkyctlError where the disk refuses."""

    def past(self) -> EventHistory:
        """All that the ranks of the attempt under way have said so far."""

    @property
    def reported(self) -> int:
        """How many steps of the attempt under way have been told of."""

    def close(self) -> None:
        """Writes what is not written yet. Idempotent."""


def begin_attempt(journal: Journal, plan: Plan, *, number: int, why: str, planned: bool) -> None:
    """Makes the folder of a new attempt and its entry in the run's state.

    Args:
        why: what it is begun for.
        planned: it replaces a healthy one.
    """
    paths = journal.paths
    if number > 1:
        paths = RunPaths(paths.run_id, number).create()
    journal.begin(paths, plan.to_json())
    entry = RunAttempt(
        number=number,
        began=timestamp(),
        why=why,
        from_step=0,
        planned=planned,
        devices=(*(stage.device for stage in plan.placed_stages), *plan.helpers),
        predicted_iteration_s=plan.predicted.iteration_s,
    )
    status = "starting" if number == 1 else "restarting"
    journal.update(attempts=(*journal.state.attempts, entry), status=status, detail=why)


def update_attempt(journal: Journal, **changes: Any) -> None:
    """Changes fields of the newest attempt's entry in the run's state."""
    attempts = journal.state.attempts
    if attempts:
        journal.update(attempts=(*attempts[:-1], attempts[-1].model_copy(update=changes)))


class FolderJournal:
    """Logs and figures of a run that has no other supervisor than this process: its state is not kept.

    Args:
        state: what is known of the run when it begins.
        note: told where there is no TensorBoard.
        sessions: by node, whose events are done with once they are heard. Else whoever takes over what runs
            there next would be told them as that one's.
    """

    def __init__(
        self,
        paths: RunPaths,
        state: RunState,
        note: Callable[[str], None],
        sessions: Mapping[str, Acknowledging] | None = None,
    ) -> None:
        self.paths, self.state = paths, state
        self._sessions = sessions or {}
        self._tensorboard = TensorBoardWriter(paths, note)
        self._limits = LogLimits(note)

    def begin(self, paths: RunPaths, plan: str | None) -> None:
        """Writes the attempt's plan into its folder."""
        self.paths = paths
        if plan is not None:
            paths.keep_plan(plan)

    def heard(self, node: str, who: str, event: Mapping[str, Any]) -> bool:
        """Adds what a rank printed, and the traceback of its end, to its log; True."""
        rank = rank_of_task(who)
        is_log = event.get("event") == "log"
        text = event.get("text" if is_log else "traceback")
        if rank is not None and text:
            path = self.paths.log(rank)
            lines = "".join(f"{line}\n" for line in str(text).splitlines()).encode("utf-8", "replace")
            _append(path, self._limits.cut(f"the log {path}", lines) if is_log else lines, "the log")
        if node in self._sessions and "seq" in event:
            self._sessions[node].acknowledge(int(event["seq"]))
        return True

    def step(self, progress: StepProgress) -> None:
        """Adds the step's line to ``metrics.jsonl``, where it can be read while the run goes on."""
        line = metrics_line(progress)
        append_lines(self.paths.metrics, [json_line(line)], "the run's figures to")
        self._tensorboard.step(line)

    def update(self, **changes: Any) -> None:
        """Changes fields of the state in memory."""
        self.state = self.state.model_copy(update=changes)

    def past(self) -> EventHistory:
        """Nothing: no other process goes on with the run."""
        return ()

    reported = 0

    def close(self) -> None:
        """Closes TensorBoard's file. Idempotent."""
        self._tensorboard.close()


class TensorBoardWriter:
    """TensorBoard's events, where it is installed. Files are made with the first step.

    It uses TensorBoard's own writer: torch's would bring torch into a process that only watches a run.

    Args:
        note: told where it is not.
    """

    def __init__(self, paths: RunPaths, note: Callable[[str], None]) -> None:
        self._folder = paths.tensorboard
        self._open: Any = None
        self._protocol: Any = None
        try:
            self._protocol = importlib.import_module("tensorboard.compat.proto.event_pb2")
            writer = importlib.import_module("tensorboard.summary.writer.event_file_writer")
            self._make = writer.EventFileWriter
        except ImportError:
            note("no TensorBoard events: it is not installed (pip install 'skyctl[tensorboard]')")

    def step(self, line: Mapping[str, Any]) -> None:
        """Adds a step's ``metrics_line``. Raises SkyctlError where the disk refuses."""
        if self._protocol is None:
            return
        metrics = line.get("validation_metrics") or {}
        values = {name: line[name] for name in _SCALARS if name in line}
        values |= {f"validation/{name}": value for name, value in metrics.items() if value is not None}
        try:
            if self._open is None:
                self._open = self._make(str(self._folder))
                # Steps from this one on that an earlier process has written are hidden.
                self._add(line["step"], file_version="brain.Event:2")
                self._add(line["step"], session_log={"status": "START"})
            scalars = [{"tag": name, "simple_value": value} for name, value in values.items()]
            self._add(line["step"], summary={"value": scalars})
            self._open.flush()
        except OSError as exc:
            raise SkyctlError(
                f"cannot write the run's figures to {self._folder}: {exc.strerror or exc}", hint=DISK_HINT
            ) from exc

    def _add(self, step: int, **content: Any) -> None:
        self._open.add_event(self._protocol.Event(wall_time=time.time(), step=step, **content))

    def close(self) -> None:
        """Closes the file. Idempotent: every step was written out when it ended."""
        writer, self._open = self._open, None
        if writer is not None:
            with suppress(OSError):
                writer.close()


def metrics_line(progress: StepProgress) -> dict[str, Any]:
    """A step's line of ``metrics.jsonl``, as a JSON object; figures that are not known are left out."""
    validation = progress.validation
    line = {
        "step": progress.step,
        "loss": progress.loss,
        "validation_loss": validation.loss if validation is not None else None,
        "validation_metrics": validation.metrics if validation is not None else None,
        "learning_rate": progress.learning_rate,
        "grad_norm": progress.grad_norm,
        "iteration_s": progress.iteration_s,
        "samples_per_s": progress.samples_per_s,
        "repeats": progress.repeats or None,
        "ahead": progress.ahead,
        **owner_lines(progress.owners),
    }
    return {key: value for key, value in line.items() if value is not None}


def read_validation(line: Mapping[str, Any]) -> ValidationMeasurement | None:
    """The validation that a line of ``metrics.jsonl`` tells of; None: it tells of none.

    Raises:
        ValueError: a figure of it is none (KeyError, TypeError: a key or a type is wrong).
    """
    if line.get("validation_loss") is None:
        return None
    return ValidationMeasurement(
        step=int(line["step"]),
        loss=float(line["validation_loss"]),
        metrics=line.get("validation_metrics"),
    )


def append_lines(path: Path, lines: Iterable[str], what: str) -> None:
    """Adds lines to a file.

    Raises:
        SkyctlError: the disk is full, or the folder is gone.
    """
    _append(path, "".join(f"{line}\n" for line in lines).encode(), what)


def _append(path: Path, data: bytes, what: str) -> None:
    if not data:
        return
    try:
        with path.open("ab") as file:
            file.write(data)
    except OSError as exc:
        raise SkyctlError(f"cannot write {what} {path}: {exc.strerror or exc}", hint=DISK_HINT) from exc
