"""One line a node while a cluster is measured or set up: what it is at, then a tick, or a cross and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

BAR = 16
PAIRS = ("links", "lines", "uplinks")
"""What is measured between nodes has a line too, and counts as none of them."""
ENDS = ("measured", "set up", "left alone", "looked at", "removed")
"""What a node that is done says last."""
SPARE_LINES = 3
"""Of the terminal's height: for the line above, and where the cursor stands."""


@dataclass
class Row:
    """``share``: 0 to 1; below 0 it has failed. ``task``: its line, where one is drawn."""

    what: str
    share: float
    task: TaskID | None = None

    @property
    def state(self) -> str:
        """``failed``, ``done`` or ``busy``."""
        return "failed" if self.share < 0 else "done" if self.share >= 1 and self.what in ENDS else "busy"


class Rows:
    """All nodes so far, in the order in which they were first heard of."""

    def __init__(self) -> None:
        self._rows: dict[str, Row] = {}

    def note(self, name: str, what: str, share: float) -> str | None:
        """Takes the news in. Returns a line worth writing where nothing is drawn: a node's end, once."""
        row = self._rows.setdefault(name, Row("", 0.0))
        before = row.state
        if before == "failed":
            return None
        first, *_ = what.splitlines() or [""]
        row.what, row.share = first, share
        if row.state in (before, "busy"):
            return None
        if row.state == "failed":
            return f"{name}: failed: {first}"
        nodes = [other for known, other in self._rows.items() if known not in PAIRS]
        done = sum(1 for other in nodes if other.state == "done")
        return f"{name}: {row.what}" + (f" ({done} of {len(nodes)})" if name not in PAIRS else "")

    def draw(self, progress: Progress) -> None:
        """Every node's line as it is now. Where there is no room for all, those that are done make it."""
        room = progress.console.height - SPARE_LINES
        crowded = len(self._rows) > room
        for name, row in self._rows.items():
            if row.task is None:
                row.task = progress.add_task("", total=1)
            progress.update(
                row.task,
                description=_line(name, row, max(map(len, self._rows))),
                completed=0 if row.state == "busy" else 1,
                visible=not (crowded and row.state == "done"),
            )

    def undraw(self) -> None:
        """The lines are gone; drawn again, they are new ones."""
        for row in self._rows.values():
            row.task = None


def _line(name: str, row: Row, width: int) -> str:
    from rich.markup import escape

    label = escape(f"{name:<{width}}")
    if row.state == "failed":
        return f"[red]✗[/red] {label} {escape(row.what)}"
    if row.state == "done":
        return f"[green]✓[/green] {label} {escape(row.what)}"
    full = round(max(0.0, min(1.0, row.share)) * BAR)
    return f"  {label} {'█' * full}{'░' * (BAR - full)} {row.share:4.0%} {escape(row.what)}"
