"""What is written down of a run as it goes on: logs, events, figures, and its state.

A supervisor tells a ``Book`` everything it hears, in order. ``supervise/custody/ledger.py`` is one that
another process can go on with at any instant.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Protocol

from skyctl.files import RunPaths
from skyctl.launch.events import Progress
from skyctl.records.run import RunState


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


def now() -> str:
    """The time as state files have it."""
    return datetime.now(UTC).isoformat(timespec="seconds")
