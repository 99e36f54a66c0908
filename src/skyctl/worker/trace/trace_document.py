"""The contents of a rank's trace file (``trace_recorder``), as the launcher reads it.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from skyctl.agent.message_fields import Index, Matches, MaxLength, Within

KEPT_STEPS = 20
SPANS_PER_MICROBATCH, SPAN_BYTES = 16, 128
"""More than a step records for each of its microbatches, and more than one takes in the file."""
_LEAST_BYTES = 64 << 10

SpanKind = Annotated[str, Matches("[FBWOCRS]|idle|transfer")]
"""An action's kind (``schedule.actions``), or one of ``trace_recorder``'s."""
Moment = Annotated[float, Within(-1e12, 1e12)]
"""Seconds on a rank's own clock."""


@dataclass(frozen=True)
class ClockReading:
    """How far another rank's clock is ahead at that moment: the previous one's, or ``sync.clock_of``."""

    at_s: Moment
    offset_s: Moment
    error_s: Moment


@dataclass(frozen=True)
class StepTrace:
    """The spans of one step: kind, microbatch, start and end."""

    step: Index
    start_s: Moment
    end_s: Moment
    spans: tuple[tuple[SpanKind, Annotated[int, Within(-1, 1e8)], Moment, Moment], ...]


@dataclass(frozen=True)
class TraceDocument:
    """The file: clock readings at the run's ``start`` and ``end``, and the newest steps."""

    kind: ClassVar[str] = "trace"
    clocks: Annotated[Mapping[str, ClockReading], MaxLength(2)]
    steps: Annotated[tuple[StepTrace, ...], MaxLength(KEPT_STEPS)]


def trace_limit_bytes(microbatches: int) -> int:
    """The most bytes that a rank's trace file can have."""
    return KEPT_STEPS * (microbatches + 4) * SPANS_PER_MICROBATCH * SPAN_BYTES + _LEAST_BYTES
