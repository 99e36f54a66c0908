"""What is written down of a run as it goes on: logs, events, figures, and its state.

A supervisor tells a ``Book`` everything it hears, in order. ``PlainBook`` writes it to the run's folder;
``supervise/custody/ledger.py`` has one that another process can go on with at any instant.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from skyctl.files import RunPaths, safe_name, write_atomic
from skyctl.launch.events import Progress
from skyctl.launch.logs import log_lines, write_lines
from skyctl.launch.metrics import Metrics
from skyctl.records.run import RunState

STATE_EVERY_S = 1.0
"""The state is written so often at most; at once where its status changes."""
UNKEPT = ("log", "alive")
"""Events that are no lines of ``events.jsonl``: a log has its own file, a sign of life is nothing later."""


class Book(Protocol):
    """Called from the supervising thread only. What it can't write it raises (SkyctlError)."""

    paths: RunPaths
    """Of the attempt under way."""
    state: RunState
    """The run as it stands."""

    def begin(self, paths: RunPaths, plan: str) -> None:
        """A new attempt, whose folder is there; ``plan``: its JSON."""

    def heard(self, node: str, who: str, event: Mapping[str, Any]) -> bool:
        """An event of a task (``rank-3``, ``keeper``), before anything is done about it.

        Returns:
            False where it was written down before, so that nothing must be done about it again.
        """

    def step(self, progress: Progress) -> None:
        """A step that every rank has finished; for a step that is done again, once more."""

    def update(self, **changes: Any) -> None:
        """What has changed of the state (``RunState``'s own fields)."""

    def close(self) -> None:
        """Writes what is not written yet. Idempotent."""


class PlainBook:
    """Writes each thing when it is told."""

    def __init__(self, paths: RunPaths, state: RunState, note: Callable[[str], None]) -> None:
        self.paths = paths
        self.state = state
        self._metrics = Metrics(paths, note).ready()
        self._written_at = 0.0
        self._dirty = False

    def begin(self, paths: RunPaths, plan: str) -> None:
        self.paths = paths
        paths.keep_plan(plan)

    def heard(self, node: str, who: str, event: Mapping[str, Any]) -> bool:
        if lines := log_lines(event):
            kind, _, number = who.partition("-")
            log = self.paths.log(int(number)) if kind == "rank" else self._other_log(node, who)
            write_lines(log, lines, "the log")
        if event.get("event") not in UNKEPT:
            line = json.dumps({"node": node, "who": who, **event})
            write_lines(self.paths.events, [line], "the run's events")
        return True

    def step(self, progress: Progress) -> None:
        self._metrics.step(progress)

    def update(self, **changes: Any) -> None:
        changed = {key: value for key, value in changes.items() if getattr(self.state, key) != value}
        if not changed:
            return
        self.state = self.state.model_copy(update=changed)
        self._dirty = True
        if "status" in changed or time.monotonic() - self._written_at >= STATE_EVERY_S:
            self._write_state()

    def close(self) -> None:
        self._metrics.close()
        if self._dirty:
            self._write_state()

    def _write_state(self) -> None:
        self.state = self.state.model_copy(update={"written": now()})
        write_atomic(self.paths.state, self.state.to_json())
        self._written_at, self._dirty = time.monotonic(), False

    def _other_log(self, node: str, who: str) -> Path:
        return self.paths.logs / f"{who}-{safe_name(node)}.log"


def now() -> str:
    """The time as state files have it."""
    return datetime.now(UTC).isoformat(timespec="seconds")
