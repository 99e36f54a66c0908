"""New lines of a run's files while another process writes them: logs, figures, the supervisor's own log.

A file may be cut a little when its writer was killed and another goes on; the same lines are written again
then, so a reader only has to wait until there is more than it has seen.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from skyctl.errors import InputError
from skyctl.files import RunPaths, read_record
from skyctl.records.base import timestamp
from skyctl.records.cluster import split_device_id
from skyctl.records.run_state import RunState
from skyctl.run.callbacks import RunCallbacks, StepProgress
from skyctl.run.journal import read_validation
from skyctl.run.log_limits import LOG_LIMIT_BYTES

READ_BYTES = 1 << 20
"""Of a file are read at a time."""
TAIL_BLOCK_BYTES = 64 << 10


class FileTail:
    """The complete lines of one file, as they come.

    Args:
        last: begin so many lines before its end; None: at its beginning.
    """

    def __init__(self, path: Path, last: int | None = None) -> None:
        self.path = path
        self._last = last
        self._at = 0 if last is None else _start_of_last(path, last)

    def lines(self) -> list[str]:
        """The lines that are new since the last call; none where there is no file."""
        out: list[str] = []
        with suppress(OSError), self.path.open("rb") as file:
            while True:
                file.seek(self._at)
                data = file.read(READ_BYTES)
                whole = data.rfind(b"\n") + 1 or (len(data) if len(data) == READ_BYTES else 0)
                if not whole:
                    break
                self._at += whole
                out += data[:whole].decode("utf-8", "replace").splitlines()
        if self._last:
            del out[: -self._last]  # its writer may have gone on since the last lines were looked for
        self._last = None
        return out


@dataclass(frozen=True)
class RankLogLine:
    """A line that a task printed. ``rank``: None where the task is no rank."""

    attempt: int
    who: str
    node: str
    rank: int | None
    text: str


class LogFollower:
    """Follows the logs of a run, of one attempt or of all.

    Args:
        only: a rank's number, or a node's name; None: all.
        attempt: only this one's; None: from the newest on.
        last: so many lines of each log that is there already; None: all.
    """

    def __init__(
        self,
        paths: RunPaths,
        state: RunState,
        *,
        only: str | None = None,
        attempt: int | None = None,
        last: int | None = None,
    ) -> None:
        self._paths, self._only = paths, only
        newest = max([1, *(begun.number for begun in state.attempts)])
        self._first = attempt or newest
        self._alone = attempt is not None
        self._last = last
        self._tails: dict[Path, FileTail] = {}
        self._state = state
        if attempt is not None and not RunPaths(paths.run_id, attempt).logs.is_dir():
            raise InputError(f"run {paths.run_id} has no attempt {attempt}; its newest is {newest}")
        self._check()

    def lines(self) -> Iterator[RankLogLine]:
        """The lines that are new, attempt by attempt, log by log."""
        for number in self._attempts():
            folder = RunPaths(self._paths.run_id, number).logs
            for path in sorted(folder.glob("*.log")):
                who, node, rank = self._whose(path.stem, number)
                if not self._wanted(node, rank):
                    continue
                tail = self._tails.get(path)
                if tail is None:
                    tail = self._tails[path] = FileTail(path, self._last)
                for text in tail.lines():
                    yield RankLogLine(number, who, node, rank, text)
        self._last = None  # a log that comes later is new from its beginning

    def update(self, state: RunState) -> None:
        """Takes the run's present state: which attempts there are, and which rank is where."""
        self._state = state

    @property
    def prefixed(self) -> bool:
        """Whether lines of several tasks may come, so that each should name its task."""
        return self._only is None or not self._only.isdigit()

    def _attempts(self) -> list[int]:
        if self._alone:
            return [self._first]
        return list(range(self._first, max([self._first, *(a.number for a in self._state.attempts)]) + 1))

    def _whose(self, stem: str, attempt: int) -> tuple[str, str, int | None]:
        kind, _, rest = stem.partition("-")
        if kind != "rank" or not rest.isdigit():
            return kind, rest, None
        rank = int(rest)
        devices = next((begun.devices for begun in self._state.attempts if begun.number == attempt), ())
        node = split_device_id(devices[rank])[0] if rank < len(devices) else ""
        return f"rank {rank}", node, rank

    def _wanted(self, node: str, rank: int | None) -> bool:
        if self._only is None:
            return True
        return rank == int(self._only) if self._only.isdigit() else node == self._only

    def _check(self) -> None:
        """Raises InputError where the run has no such rank or node."""
        if self._only is None:
            return
        devices = [device for begun in self._state.attempts for device in begun.devices]
        nodes = sorted({split_device_id(device)[0] for device in devices})
        ranks = max((len(begun.devices) for begun in self._state.attempts), default=0)
        if devices and (int(self._only) >= ranks if self._only.isdigit() else self._only not in nodes):
            raise InputError(
                f"--rank {self._only}: run {self._paths.run_id} has ranks 0 to {ranks - 1} "
                f"on {', '.join(nodes)}"
            )


class MetricsFollower:
    """The lines of ``metrics.jsonl`` as they come.

    Steps that are done again come again: the file is replaced by a shorter one then.
    """

    def __init__(self, paths: RunPaths) -> None:
        self._path = paths.metrics
        self._tail = FileTail(self._path)
        self._inode = 0
        self._next = 0

    def lines(self) -> list[dict[str, Any]]:
        """The steps that are new since the last call, as JSON objects."""
        try:
            inode = self._path.stat().st_ino
        except OSError:
            return []
        another = inode != self._inode
        if another:
            self._inode, self._tail = inode, FileTail(self._path)
        steps = [json.loads(line) for line in self._tail.lines()]
        if another:
            self._next = min(self._next, steps[-1]["step"] + 1 if steps else 0)
        new = [line for line in steps if line["step"] >= self._next]
        self._next = max([self._next, *(line["step"] + 1 for line in new)])
        return new


def read_state(paths: RunPaths) -> RunState:
    """The run's state as its file has it now. Raises InputError."""
    return read_record(RunState, paths.state)


def remaining_s(line: dict[str, Any], state: RunState) -> float:
    """Seconds that the steps after that line's take at its pace."""
    return float(line["iteration_s"]) * max(0, (state.steps or 0) - int(line["step"]) - 1)


def read_step(line: dict[str, Any], state: RunState, unit: str) -> StepProgress:
    """A step as a line of ``metrics.jsonl`` has it.

    Args:
        unit: what people call a step of the run (``Rhythm.unit``).
    """
    return StepProgress(
        step=int(line["step"]),
        steps=state.steps or 0,
        loss=float(line["loss"]),
        iteration_s=float(line["iteration_s"]),
        samples_per_s=float(line["samples_per_s"]),
        left_s=remaining_s(line, state),
        learning_rate=line.get("learning_rate"),
        grad_norm=line.get("grad_norm"),
        validation=read_validation(line),
        unit=unit,
    )


def _start_of_last(path: Path, lines: int) -> int:
    """The offset at which the last ``lines`` complete lines of a file begin."""
    try:
        with path.open("rb") as file:
            at = file.seek(0, 2)
            ends = -1  # the end of the last line is none's beginning
            while at > 0:
                step = min(TAIL_BLOCK_BYTES, at)
                at -= step
                file.seek(at)
                block = file.read(step)
                for index in range(len(block) - 1, -1, -1):
                    if block[index] == 10:
                        ends += 1
                        if ends == lines:
                            return at + index + 1
            return 0
    except OSError:
        return 0


# The output of a supervisor, kept in ``supervisor.log`` for those who look later or from elsewhere.

LINE_KINDS = ("phase", "note", "warning", "error")


class SupervisorLogLine(NamedTuple):
    """One line of ``supervisor.log``. ``kind``: one of ``LINE_KINDS``; empty for what was merely printed."""

    at: str
    kind: str
    text: str


def with_supervisor_log(callbacks: RunCallbacks, path: Path) -> RunCallbacks:
    """The same callbacks, whose phases, notes and warnings also go to ``supervisor.log``."""

    def keeping(kind: str, tell_watcher: Callable[[str], None]) -> Callable[[str], None]:
        def tell(text: str) -> None:
            log_supervisor(path, kind, text)
            tell_watcher(text)

        return tell

    return replace(
        callbacks,
        phase=keeping("phase", callbacks.phase),
        note=keeping("note", callbacks.note),
        warn=keeping("warning", callbacks.warn),
    )


_lock = threading.Lock()


def log_supervisor(path: Path, kind: str, text: str) -> None:
    """Adds an entry to ``supervisor.log``; a failure to write it is ignored, for the run matters more."""
    stamped = f"{timestamp('milliseconds')} {kind}: " + text.replace("\n", "\n    ") + "\n"
    with suppress(OSError), _lock, path.open("a", encoding="utf-8", errors="replace") as log:
        path.chmod(0o600)
        if log.tell() < LOG_LIMIT_BYTES:  # what nodes say is part of it
            log.write(stamped)


def parse_supervisor_line(line: str) -> SupervisorLogLine:
    """A line of ``supervisor.log``, taken apart."""
    at, _, rest = line.partition(" ")
    kind, colon, text = rest.partition(": ")
    if colon and kind in LINE_KINDS and at[:4].isdigit():
        return SupervisorLogLine(at, kind, text)
    return SupervisorLogLine("", "", line)
