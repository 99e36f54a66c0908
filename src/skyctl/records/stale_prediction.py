"""What staleness is worth, as a plan predicts it."""

from __future__ import annotations

from skyctl.records.base import Name, Record, Seconds, Seq

NOTABLE_GAIN = 1.05
"""Less, as a factor, is not called faster."""


class StalePrediction(Record):
    """Where a parameter server takes the place of sums: the same draws without staleness, and the bound.

    Attributes:
        synchronous_s: a step in the long run where all wait for all after each.
        bound_s: no staleness makes a step faster in the long run: what it takes the slowest device on
            average, with nobody to wait for.
        slowest: that device.
        unknown: the devices of which no run has shown how uneven their steps are; they count as all alike.
    """

    synchronous_s: Seconds
    bound_s: Seconds
    slowest: Name
    unknown: Seq[Name] = ()

    @property
    def helps(self) -> bool:
        """Whether any staleness could make steps notably faster than all waiting for all."""
        return self.synchronous_s > NOTABLE_GAIN * self.bound_s
