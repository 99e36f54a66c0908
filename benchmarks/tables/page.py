"""A section's result: one JSON line to print, and Markdown for ``docs/planner.md`` between its markers."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "planner.md"


@dataclass(frozen=True)
class Table:
    """``record``: what is printed. ``text``: title, table and notes in Markdown."""

    record: dict[str, Any]
    text: str

    def line(self) -> str:
        """One JSON document on one line."""
        return json.dumps({"benchmark": "planner", **_short(self.record)}, ensure_ascii=False)


def _short(value: Any) -> Any:
    """Floats to six digits, all the way down."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _short(inner) for key, inner in value.items()}
    return [_short(inner) for inner in value] if isinstance(value, list | tuple) else value


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; the first column to the left, the others to the right."""
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def machine() -> str:
    """The machine and the versions that the figures were measured on."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (
        f"{cores} cores, Python {platform.python_version()}, "
        f"OR-Tools {version('ortools')}, numpy {version('numpy')}"
    )


def replaced(text: str, section: str, body: str) -> str:
    """``text`` with what stands between the section's markers exchanged for ``body``.

    Raises:
        ValueError: there are no such markers.
    """
    begin, end = f"<!-- {section}: generated -->", f"<!-- {section}: end -->"
    before, found, rest = text.partition(begin)
    _, ended, after = rest.partition(end)
    if not found or not ended:
        raise ValueError(f"no markers for {section!r}: {begin} … {end}")
    return f"{before}{begin}\n\n{body.strip()}\n\n{end}{after}"


def write(section: str, tables: Sequence[Table], command: str, path: Path = DOCUMENT) -> None:
    """Puts a section's tables into the document."""
    body = "\n\n".join([*(table.text for table in tables), f"`{command}` · {machine()}."])
    path.write_text(replaced(path.read_text(encoding="utf-8"), section, body), encoding="utf-8")


def seconds(value: float) -> str:
    """For a table: 0.4 ms, 12 ms, 1.23 s."""
    if value < 0.0095:
        return f"{value * 1e3:.2g} ms"
    return f"{value * 1e3:.0f} ms" if value < 0.9995 else f"{value:.3g} s"


def percent(gap: float | None) -> str:
    """A gap: 0, 0.021%, 4.8%; — where no bound is claimed."""
    if gap is None:
        return "—"
    return "0" if gap <= 1e-9 else f"{gap * 100:.2g}%"
