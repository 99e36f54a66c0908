"""A rank's trace: what it did when, as spans on this process's clock, of the newest steps only.

Off unless asked for. A span costs one call and one tuple: 0.6 µs for an action with its messages. Only the
newest ``KEPT_STEPS`` steps are kept, so that a long run takes no more memory than a short one.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyctl.worker.trace.clock_offset import ClockOffset
from skyctl.worker.trace.trace_document import KEPT_STEPS

CLIP = "C"
SUM = "R"
SEND = "S"
IDLE = "idle"
TRANSFER = "transfer"


TraceSpan = tuple[str, int, float, float]
"""(kind, microbatch, start, end), seconds on this clock; a named tuple would take twice as long to make.

The kind is an action's (``schedule.actions``), ``CLIP``, ``SUM`` (of gradients, after the last backward of
all pipelines), or one of these: ``SEND``, handing a message over
(where a window is full, waiting for room in it); ``IDLE`` and ``TRANSFER``, waiting for an action's input
(see ``messages``).
"""


@dataclass
class _StepSpans:
    """The spans of one step; ``end_s`` is None where the step lasts until the next one begins."""

    step: int
    start_s: float
    spans: list[TraceSpan]
    end_s: float | None = None


class TraceRecorder:
    """Collects spans: called at an action's end with the seconds it took.

    Args:
        steps: how many of the newest steps are kept.
        first_microbatch: the number, within the step, of this pipeline's first one.
        clock: must run as fast as ``time.perf_counter``.
    """

    def __init__(
        self,
        steps: int = KEPT_STEPS,
        first_microbatch: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.clock = clock
        self._first = first_microbatch
        self._steps: deque[_StepSpans] = deque(maxlen=steps)
        self._spans: list[TraceSpan] = []
        self._last_end_s = self._step_end_s = clock()
        self._clock_offsets: dict[str, ClockOffset] = {}

    def begin(self, step: int) -> None:
        """Starts a step: the spans that follow belong to it."""
        self._spans = []
        self._last_end_s = self.clock()
        self._steps.append(_StepSpans(step, self._last_end_s, self._spans))

    def end(self) -> None:
        """Ends the step, unless another follows: then it lasts until that one begins."""
        self._step_end_s = self.clock()

    def end_step_early(self) -> None:
        """Ends the step now: what comes before the next one (a validation) belongs to no step."""
        self._steps[-1].end_s = self.clock()

    def record_action(self, kind: str, microbatch: int, seconds: float) -> None:
        """An action has just ended, in which the device was busy for ``seconds``."""
        end = self._last_end_s = self.clock()
        self._spans.append((kind, self._first + microbatch, end - seconds, end))

    def record_wait(self, microbatch: int, idle_s: float, transfer_s: float, kind: str = TRANSFER) -> None:
        """A message has just been received, after this much waiting; ``kind``: what ``transfer_s`` was."""
        microbatch += self._first
        end = self._last_end_s = self.clock()
        announced = end - transfer_s
        if idle_s > 0.0:
            self._spans.append((IDLE, microbatch, announced - idle_s, announced))
        self._spans.append((kind, microbatch, announced, end))

    def record_send(self, microbatch: int) -> None:
        """A message has just been handed over, which began at the end of the action before it."""
        end = self.clock()
        self._spans.append((SEND, self._first + microbatch, self._last_end_s, end))
        self._last_end_s = end

    def record_clock_offset(self, when: str, offset: ClockOffset) -> None:
        """The offset of another rank's clock (``ClockReading``), at the run's ``start`` or ``end``."""
        self._clock_offsets[when] = offset

    def document(self) -> dict[str, Any]:
        """The trace as JSON values: ``clocks`` (empty on the first rank) and ``steps``, the oldest first."""
        ends = [*[step.start_s for step in self._steps][1:], self._step_end_s][: len(self._steps)]
        return {
            "clocks": {when: offset._asdict() for when, offset in self._clock_offsets.items()},
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
        """Writes the document to ``path`` and returns the path."""
        path.write_text(json.dumps(self.document(), separators=(",", ":")), encoding="utf-8")
        return str(path)
