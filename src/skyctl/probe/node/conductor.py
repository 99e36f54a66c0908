"""What one device hears of the others while its layers are measured."""

from __future__ import annotations

from typing import Protocol


class Conductor(Protocol):
    """Keeps all devices in step, so that those that share a machine are measured in the same seconds."""

    def progress(self, done: int, of: int, what: str) -> None:
        """Of a pass."""

    def passed(self) -> None:
        """The first pass is over."""

    def count_s(self) -> float | None:
        """For how long what is measured counts, at most; None: others are still at their first pass."""

    def measured(self) -> None:
        """All is steady, or the time is spent."""

    def stopped(self) -> bool:
        """Whether the others have measured all, too."""
