"""The event sink of a supervised run: state, logs, events and figures, from which any process can go on.

A run's nodes keep each event until they hear that it was handled, and they hear that only once it is on disk
here. ``state.json`` has the run's state; ``commit_log`` keeps all other files in step.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Protocol

from skyctl.errors import SkyctlError
from skyctl.files import RunPaths, json_line, read_record, safe_name, write_atomic
from skyctl.records.base import timestamp
from skyctl.records.run_state import RunState
from skyctl.run.callbacks import StepProgress
from skyctl.run.journal import TensorBoardWriter, metrics_line
from skyctl.run.log_limits import LogLimits
from skyctl.run.rank_spec import rank_of_task
from skyctl.run.wandb_writer import WandbWriter, wandb_project
from skyctl.supervision.commit_log import CommitLog

FLUSH_INTERVAL_S = 0.5
"""How long what a rank said may wait to be written."""
STATE_INTERVAL_S = 1.0

WRITTEN_AT_ONCE = {
    "status",
    "attempts",
    "sessions",
    "supervisor",
    "away",
    "lost",
    "untrusted",
    "checkpoint",
    "best",
    "stopped_early",
    "detail",
    "order",
}
"""Of these a change is written before ``update`` returns."""

LAST_WORDS = ("error", "exit")
_NOT_KEPT = ("alive",)
"""Events that mean nothing later."""


class NumberedSession(Protocol):
    """The part of a session (``remote.agent_session``) that the journal needs: it keeps numbered events."""

    @property
    def id(self) -> str:
        """The agent's name for the session."""

    @property
    def watermark(self) -> int:
        """The number up to which all of its events were handled."""

    def acknowledge(self, seq: int) -> None:
        """The event of that number is on disk: the node may forget it."""


class RunJournal:
    """The journal of one run. Threads may share it; whoever made it must ``close`` it.

    ``state``: as last told, which may be a second newer than the file. ``paths``: of the last attempt.
    ``sessions``: by node, whose events they are; the supervisor's own mapping, as it changes.
    """

    def __init__(self, paths: RunPaths, state: RunState, note: Callable[[str], None]) -> None:
        self.paths = paths
        self.state = state
        self._lock = threading.RLock()
        self._writing = threading.Lock()
        self._dirty = True
        self._written_at = float("-inf")
        self.sessions: Mapping[str, NumberedSession] = {}
        self._ids: dict[str, str] = {}
        self._failure: SkyctlError | None = None
        self._log = CommitLog(paths.folder, self._acknowledge)
        self._tensorboard = None if state.is_script else TensorBoardWriter(paths, note)
        self._wandb: WandbWriter | None = None
        self._note = note
        self._limits = LogLimits(note)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._flush_regularly, name="run journal", daemon=True)

    @classmethod
    def create(cls, paths: RunPaths, state: RunState, note: Callable[[str], None]) -> RunJournal:
        """The journal of a new run.

        Args:
            note: told where there is no TensorBoard.

        Raises:
            SkyctlError: the folder can't be written.
        """
        return cls(paths, state, note)._started()

    @classmethod
    def open(cls, run_id: str, note: Callable[[str], None]) -> RunJournal:
        """The journal that a process, maybe killed, has left; files are cut to what it had saved.

        Only whoever holds the run's lock (``run_lock``) may do that.

        Raises:
            InputError: there is no such run, or its state can't be read.
        """
        state = read_record(RunState, RunPaths(run_id).state)
        number = state.attempts[-1].number if state.attempts else 1
        made = cls(RunPaths(run_id, number), state, note)
        made._log = CommitLog.open(made.paths.folder, made._acknowledge)
        for name, size in made._log.sizes().items():
            if name.endswith(".log"):
                made._limits.begin(name, size)
        return made._started()

    def _started(self) -> RunJournal:
        self.write_state()
        self._thread.start()
        return self

    # --- the state

    def update(self, **changes: Any) -> None:
        """Changes fields of the state. Raises SkyctlError where the disk refuses, or has refused before."""
        with self._lock:
            before = self.state
            self.state = before.model_copy(update=changes)
            changed = {name for name, value in changes.items() if getattr(before, name) != value}
            self._dirty = self._dirty or bool(changed)
        if changed & WRITTEN_AT_ONCE:
            self.write_state()
        self._raise_failure()

    def write_state(self) -> None:
        """Writes ``state.json`` now. Raises SkyctlError where the disk refuses."""
        with self._writing:
            with self._lock:
                self.state = self.state.model_copy(update={"written": timestamp("milliseconds")})
                text, self._dirty = self.state.to_json(), False
            with suppress(SkyctlError):  # the next flush says it; the state may still find room
                self._log.flush()  # else it could count a step whose line is not there, were this the end
            self._written_at = time.monotonic()
            write_atomic(self.paths.state, text)

    def begin(self, paths: RunPaths, plan: str | None) -> None:
        """A new attempt, whose folder is there; ``plan``: its JSON, None where it has none."""
        self.flush()
        if plan is not None:
            paths.keep_plan(plan)
        with self._lock:
            self.paths = paths

    # --- events

    def upto(self, session_id: str) -> int:
        """The number up to which all events of that session are handled; later ones are wanted."""
        return self._log.upto(session_id)

    def heard(self, node: str, who: str, event: Mapping[str, Any]) -> bool:
        """Writes an event down, within ``FLUSH_INTERVAL_S``.

        Args:
            who: the task, as in ``rank-3`` or ``keeper``.
            event: its ``seq``, where it has one, is its number in the node's session.

        Returns:
            False where it was written down before, so it must not be acted on again.

        Raises:
            SkyctlError: the disk has refused to take what came before.
        """
        self._raise_failure()
        session = self.sessions.get(node)
        if session is not None:
            self._ids[node] = session.id
        source = self._ids.get(node, node)  # of a node that is lost, what it had said before may still come
        number = self.paths.attempt
        kind = event.get("event")
        name: str | None = None
        data = b""
        if kind == "log":
            name = self._log_name(node, who, number)
            data = self._limits.cut(name, _lines(str(event.get("text", ""))))
        elif kind not in _NOT_KEPT:
            name = f"attempts/{number}/events.jsonl"
            data = f"{json_line({'node': node, 'who': who, **event})}\n".encode()
            if rank_of_task(who) is None and not self._limits.fits(f"{name} of {who} on {node}", len(data)):
                name = None  # a rank's are as many as its steps
        fresh = self._log.take(source, event.get("seq"), name, data)
        if fresh and event.get("traceback"):
            self._log.take("", None, self._log_name(node, who, number), _lines(str(event["traceback"])))
        if kind in LAST_WORDS:
            self.flush()  # an error that is about to be shown names the log
        return fresh

    def step(self, progress: StepProgress) -> None:
        """A step that every rank has finished: a line of ``metrics.jsonl``.

        One that was done before, in an earlier attempt, replaces that one's line and those after it.
        """
        step = progress.step
        name = self.paths.metrics.name
        if step < self._log.notes.get("metrics", 0):
            self.flush()
            before = [line for line in _json_lines(self.paths.metrics) if int(line["step"]) < step]
            self._log.replace(name, "".join(f"{json_line(line)}\n" for line in before).encode())
        notes = {"metrics": step + 1, "reported": [self.paths.attempt, step + 1]}
        line = metrics_line(progress)
        if self._tensorboard is not None:
            self._tensorboard.step(line)
        if self._wandb is None and (project := wandb_project(self.state)) is not None:
            self._wandb = WandbWriter(project, self.state, self.paths.folder, self._note)
        if self._wandb is not None:
            self._wandb.step(line)
        self._log.take("", None, name, f"{json_line(line)}\n".encode(), notes)

    def events(self) -> Iterator[dict[str, Any]]:
        """The last attempt's events, in the order they were written down."""
        self.flush()
        yield from _json_lines(self.paths.events)

    def past(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """(rank, event) of all that the last attempt's ranks have reported, in order."""
        for event in self.events():
            if (rank := rank_of_task(str(event.get("who")))) is not None:
                yield rank, event

    @property
    def reported(self) -> int:
        """How many steps of the last attempt have their line in ``metrics.jsonl``."""
        attempt, step = self._log.notes.get("reported", [0, 0])
        return int(step) if attempt == self.paths.attempt else 0

    def _log_name(self, node: str, who: str, attempt: int) -> str:
        rank = rank_of_task(who)
        file = f"rank-{rank:03d}" if rank is not None else f"{safe_name(who)}-{safe_name(node)}"
        return f"attempts/{attempt}/logs/{file}.log"

    # --- the disk

    def flush(self) -> None:
        """Everything taken so far is on disk. Raises SkyctlError where it refuses."""
        for session in list(self.sessions.values()):
            self._log.settle(session.id, session.watermark)
        self._log.flush()
        self._failure = None

    def close(self) -> None:
        """Writes what is left. Idempotent; raises SkyctlError where the disk refuses."""
        self._closed.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.close()
        self.flush()
        if self._dirty:
            self.write_state()

    def _flush_regularly(self) -> None:
        while not self._closed.wait(FLUSH_INTERVAL_S):
            try:
                self.flush()
                if self._dirty and time.monotonic() - self._written_at >= STATE_INTERVAL_S:
                    self.write_state()
            except SkyctlError as exc:
                self._failure = exc

    def _raise_failure(self) -> None:
        """Raises the error of an earlier write that the disk has refused."""
        failure = self._failure
        if failure is not None:
            raise SkyctlError(failure.message, hint=failure.hint)

    def _acknowledge(self, source: str, numbers: list[int]) -> None:
        session = next((s for s in list(self.sessions.values()) if s.id == source), None)
        if session is not None:
            with suppress(SkyctlError):  # it is lost; whoever takes it over says from where
                for number in numbers:
                    session.acknowledge(number)


def _lines(text: str) -> bytes:
    return "".join(line + "\n" for line in text.splitlines()).encode("utf-8", "replace")


def _json_lines(path: Any) -> Iterator[dict[str, Any]]:
    try:
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                yield json.loads(line)
    except FileNotFoundError:
        return
