"""The worth of staleness, as a plan predicts it."""

from __future__ import annotations

from skyctl.records.base import Name, Record, Seconds, Seq

NOTABLE_GAIN = 1.05
"""Times as fast; less is not called faster."""


class StalePrediction(Record):
    """The times that a step with a parameter server is held against: without staleness, and with any.

    Attributes:
        synchronous_s: seconds of a step in the long run, of the same draws, where all wait for all after
            each step.
        bound_s: seconds of a step that no staleness is below in the long run: what one takes the slowest
            device on average, with nobody to wait for.
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
