"""Lines added to files of a run's folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from skyctl.errors import SkyctlError
from skyctl.files import RunPaths
from skyctl.launch.spec import RankSpec


def write_lines(path: Path, lines: Iterable[str], what: str) -> None:
    """Adds lines to a file.

    Raises:
        SkyctlError: the disk is full, or the folder is gone.
    """
    try:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in lines)
    except OSError as exc:
        raise SkyctlError(
            f"cannot write {what} {path}: {exc.strerror or exc}",
            hint="free some space, or set SKYCTL_HOME to another disk",
        ) from exc


def log_lines(event: Mapping[str, Any]) -> list[str]:
    """What of an event belongs in its rank's log: what was printed, and the traceback of its end."""
    if event.get("event") == "log":
        return str(event.get("text", "")).splitlines()
    return str(event.get("traceback") or "").splitlines()


def keep_log(paths: RunPaths, spec: RankSpec, event: Mapping[str, Any]) -> None:
    """Adds it to the rank's log, where there is anything in it (SkyctlError where that can't be written)."""
    if lines := log_lines(event):
        write_lines(paths.log(spec.rank), lines, "the log")
