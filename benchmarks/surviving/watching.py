"""The words of a run while it is struck, and how long it says nothing."""

from __future__ import annotations

import re
import time
from typing import Any

SILENT_S = 15.0
"""Longer than that nothing may be waited for without a word of it."""
ANNOUNCED = re.compile(r"trying again in \d+ s|waiting|Ctrl-C ends that")
"""The words that say that something is waited for."""


class Watch:
    """Looks at what a run's command has printed and at its steps; ``silences``: each that was too long.

    A silence is the time between two lines or steps, but where the line before said what is waited for.
    """

    def __init__(self, run: Any) -> None:
        self._run = run
        self._seen: tuple[Any, ...] = ()
        self._lines = ""
        self._at = time.monotonic()
        self.steps = 0
        self._last_step_at = self._at
        self.longest_s = 0.0
        self.silences: list[dict[str, Any]] = []

    def look(self) -> int:
        """Takes in what is there; how many steps have been done at some time."""
        child = self._run.child
        lines = child.err
        steps = max((step["step"] + 1 for step in self._run.steps), default=0)
        seen = (id(child), len(lines), steps, len(child.out), child.process.poll())
        if seen != self._seen:
            self._note_silence()
            self._seen, self._at = seen, time.monotonic()
            if steps > self.steps:
                self.steps, self._last_step_at = steps, self._at
            self._lines = lines
        return self.steps

    @property
    def end_s(self) -> float:
        """Seconds from the last step to the command's end, once it has ended."""
        return self._at - self._last_step_at

    def pause(self) -> None:
        """Nobody is there who could say anything."""
        self._at = time.monotonic()

    def _note_silence(self) -> None:
        quiet_s = time.monotonic() - self._at
        last = [line.strip() for line in self._lines.splitlines() if line.strip()][-2:]
        if any(ANNOUNCED.search(line) for line in last):
            return
        self.longest_s = max(self.longest_s, quiet_s)
        if quiet_s > SILENT_S:
            self.silences.append({"s": round(quiet_s, 1), "after": last[-1][:200] if last else ""})
