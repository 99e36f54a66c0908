"""How sure a predicted time is."""

from __future__ import annotations

from pydantic import model_validator

from skyctl.records.base import Record, Seconds

INTERVAL_SHARE = 0.8
"""The part of predictions whose measured median is to lie within their interval."""


class Interval(Record):
    """A range, in seconds, expected to hold the median of the measured times in eight cases of ten."""

    low_s: Seconds
    high_s: Seconds

    @model_validator(mode="after")
    def _ordered(self) -> Interval:
        if self.high_s < self.low_s:
            raise ValueError(f"an interval from {self.low_s:g} to {self.high_s:g} s")
        return self

    def holds(self, seconds: float) -> bool:
        """Whether a time lies within."""
        return self.low_s <= seconds <= self.high_s
