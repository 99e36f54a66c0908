"""The attempts over each backend, what came of them, and the table that the suite writes of that."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from ..helpers.runs import Run

SKYCTL, GLOO = BACKENDS = ("skyctl", "gloo")
HELD = "held"
FOLDER = Path(__file__).parents[2] / "build"
LIMIT_S = 200.0
"""For a run over Gloo of which nothing is promised: one that has not ended by then has stalled."""


def unpromised(reason: str) -> pytest.MarkDecorator:
    """For what ``skyctl`` alone promises: over Gloo it is tried as well, and may fail.

    Args:
        reason: what of Gloo makes it so; it stands in the table.
    """
    return pytest.mark.unpromised(reason)


@dataclass
class Over:
    """The backend of a test's runs.

    Attributes:
        attempt: what is tried, for the table; tests of the same are counted together.
        happened: where it did not hold: ``unnoticed``, ``stalled``, ``ended``, ``process ended``.
    """

    backend: str
    attempt: str = ""
    happened: str = ""

    @property
    def words(self) -> tuple[str, ...]:
        """For ``launch``."""
        return ("--backend", self.backend)

    def note(self, run: Run) -> None:
        """Keeps what has come of a run, in case that it is not what the test asks for."""
        self.happened = what_happened(run)


def what_happened(run: Run) -> str:
    """In a word, by what the run has recorded."""
    state = run.state
    if state["status"] not in ("done", "failed"):
        return "stalled"
    if "ended by SIG" in " ".join(one["error"] or "" for one in state["attempts"]):
        return "process ended"
    if state["status"] == "failed" or len(state["attempts"]) > 1:
        return "ended"
    return "unnoticed"


@dataclass(frozen=True)
class Row:
    """The outcome of one test; ``backend`` and ``attempt`` are empty if nothing is carried."""

    test: str
    backend: str
    attempt: str
    happened: str
    reason: str


def row_of(item: pytest.Item, over: Over | None, report: pytest.TestReport) -> Row:
    """Of a test that has just been run."""
    mark = item.get_closest_marker("unpromised")
    reason = mark.args[0] if mark is not None and over is not None and over.backend == GLOO else ""
    came = HELD if report.passed else (over.happened if over is not None else "") or "failed"
    if over is None:
        return Row(item.nodeid, "", "", came, "")
    return Row(item.nodeid, over.backend, over.attempt, came, reason)


def write_report(rows: Iterable[Row]) -> Path:
    """Puts them into ``build/attack.jsonl`` in the place of older ones, and the table of all beside it."""
    FOLDER.mkdir(exist_ok=True)
    kept = FOLDER / "attack.jsonl"
    known: dict[str, dict[str, Any]] = {}
    if kept.exists():
        known = {row["test"]: row for row in map(json.loads, kept.read_text().splitlines())}
    known |= {row.test: asdict(row) for row in rows}
    kept.write_text("".join(json.dumps(row) + "\n" for row in known.values()))
    table = FOLDER / "attack.md"
    table.write_text(markdown([Row(**row) for row in known.values()]))
    return table


def markdown(rows: Iterable[Row]) -> str:
    """A row for each thing that is tried: what came of it over each backend, and how often."""
    came: dict[str, dict[str, Counter[str]]] = {}
    reasons: dict[str, str] = {}
    for row in rows:
        counts = came.setdefault(row.attempt, {}).setdefault(row.backend, Counter())
        counts[row.happened] += 1
        if row.reason:
            reasons[row.attempt] = row.reason
    others = came.pop("", {}).get("", Counter())
    lines = ["| tried | skyctl | Gloo | promised over Gloo |", "|---|---|---|---|"]
    for attempt, counts in came.items():
        cells = [_counted(counts.get(backend, Counter())) for backend in BACKENDS]
        promised = "yes" if GLOO in counts else "is not offered"
        lines.append(f"| {attempt} | {' | '.join(cells)} | {reasons.get(attempt) or promised} |")
    lines += [
        "",
        f"Tests of what carries nothing, or of skyctl's own connections alone: {_counted(others)}.",
    ]
    return "\n".join(lines) + "\n"


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{number} {word}" for word, number in sorted(counts.items())) or "–"
