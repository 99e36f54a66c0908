"""What a rank did when: spans on this process's clock, the last steps only.

Off unless asked for. A span costs one call and one tuple: 0.6 µs for an action with its messages. Only the
newest ``STEPS`` steps are kept, so that a long run takes no more memory than a short one.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyctl.transport.clocks import Reading

STEPS = 20
CLIP = "C"
SEND = "S"
IDLE = "idle"
TRANSFER = "transfer"


Span = tuple[str, int, float, float]
"""(kind, microbatch, start, end); a plain tuple, as a named one takes twice as long to make.

The kind is an action's (``schedule.actions``), ``CLIP``, or one of these: ``SEND``, handing a message over
(where a window is full, waiting for room in it); ``IDLE`` and ``TRANSFER``, waiting for an action's input
(see ``messages``).
"""


@dataclass
class _Step:
    """``end_s``: None where it goes on until the next one begins."""

    step: int
    start_s: float
    spans: list[Span]
    end_s: float | None = None


class Recorder:
    """Gets told at an action's end how long it took; ``clock`` must go as fast as ``time.perf_counter``."""

    def __init__(self, steps: int = STEPS, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._steps: deque[_Step] = deque(maxlen=steps)
        self._spans: list[Span] = []
        self._ended_s = self._over_s = clock()
        self._clocks: dict[str, Reading] = {}

    def begin(self, step: int) -> None:
        """What follows belongs to that step."""
        self._spans = []
        self._ended_s = self.clock()
        self._steps.append(_Step(step, self._ended_s, self._spans))

    def end(self) -> None:
        """The step is over; what comes until the next one belongs to it only where there is a next one."""
        self._over_s = self.clock()

    def apart(self) -> None:
        """What comes until the next step belongs to none: a validation."""
        self._steps[-1].end_s = self.clock()

    def ran(self, kind: str, microbatch: int, seconds: float) -> None:
        """An action has just ended, of which the device was busy for ``seconds``."""
        end = self._ended_s = self.clock()
        self._spans.append((kind, microbatch, end - seconds, end))

    def waited(self, microbatch: int, idle_s: float, transfer_s: float) -> None:
        """A message has just been taken; it was waited for so long."""
        end = self._ended_s = self.clock()
        there = end - transfer_s
        if idle_s > 0.0:
            self._spans.append((IDLE, microbatch, there - idle_s, there))
        self._spans.append((TRANSFER, microbatch, there, end))

    def sent(self, microbatch: int) -> None:
        """A message has just been handed over; that began when the action before it had ended."""
        end = self.clock()
        self._spans.append((SEND, microbatch, self._ended_s, end))
        self._ended_s = end

    def compared(self, when: str, reading: Reading) -> None:
        """How the clock of the rank before stands to this one, at the ``start`` or the ``end``."""
        self._clocks[when] = reading

    def document(self) -> dict[str, Any]:
        """All of it, as JSON: ``clocks`` (none on the first rank) and ``steps``, the oldest first."""
        ends = [*[step.start_s for step in self._steps][1:], self._over_s]
        return {
            "clocks": {when: reading._asdict() for when, reading in self._clocks.items()},
            "steps": [
                {
                    "step": step.step,
                    "start_s": step.start_s,
                    "end_s": end if step.end_s is None else step.end_s,
                    "spans": step.spans,
                }
                for step, end in zip(self._steps, ends, strict=True)
            ],
        }

    def save(self, path: Path) -> str:
        """Writes the document there and returns the path."""
        path.write_text(json.dumps(self.document(), separators=(",", ":")), encoding="utf-8")
        return str(path)
