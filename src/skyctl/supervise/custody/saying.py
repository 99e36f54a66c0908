"""What a supervisor says, kept in ``supervisor.log`` for those who look later or from elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from skyctl.launch.events import Watcher
from skyctl.supervise.custody.ledger import now

KINDS = ("phase", "note", "warning", "error")


class Said(NamedTuple):
    """One line of it. ``kind``: one of ``KINDS``, or empty for what was just printed."""

    at: str
    kind: str
    text: str


def kept(watcher: Watcher, path: Path) -> Watcher:
    """The same watcher, whose phases, notes and warnings are also added to the file."""

    def keeping(kind: str, told: Callable[[str], None]) -> Callable[[str], None]:
        def tell(text: str) -> None:
            say(path, kind, text)
            told(text)

        return tell

    return replace(
        watcher,
        phase=keeping("phase", watcher.phase),
        note=keeping("note", watcher.note),
        warn=keeping("warning", watcher.warn),
    )


_lock = threading.Lock()


def say(path: Path, kind: str, text: str) -> None:
    """Adds it, a line break within it indented. What can't be written is let be: it is beside the work."""
    stamped = f"{now()} {kind}: " + text.replace("\n", "\n    ") + "\n"
    with suppress(OSError), _lock, path.open("a", encoding="utf-8", errors="replace") as log:
        path.chmod(0o600)
        log.write(stamped)


def parse(line: str) -> Said:
    """A line of that file."""
    at, _, rest = line.partition(" ")
    kind, colon, text = rest.partition(": ")
    if colon and kind in KINDS and at[:4].isdigit():
        return Said(at, kind, text)
    return Said("", "", line)
