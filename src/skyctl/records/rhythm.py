"""When what pipelines sum takes effect."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from skyctl.records.base import Index, Record


class Rhythm(Record):
    """When the sums of several pipelines take effect; as it is by default, each before the next step.

    Attributes:
        delay: 1: a step's gradients are summed while the next step computes, and applied after it (delayed
            parameter updates, DeDLOC, arXiv 2106.10207).
        undelayed_steps: how many steps at the start of the run are made without that delay.
        staleness: other than 0: one device holds weights and optimizer and applies each pipeline's gradients
            as they come, and a pipeline may be that many steps ahead of the slowest (stale synchronous
            parallel, Ho et al., NIPS 2013); null: any number.
    """

    delay: Literal[0, 1] = 0
    undelayed_steps: Index = 0
    staleness: Index | None = 0

    @property
    def is_synchronous(self) -> bool:
        """Whether each step's sum takes effect before the next step begins."""
        return self == Rhythm()

    @property
    def is_stale(self) -> bool:
        """Whether a parameter server takes the place of sums."""
        return self.staleness != 0

    @model_validator(mode="after")
    def _means_something(self) -> Rhythm:
        if self.undelayed_steps and not self.delay:
            raise ValueError("undelayed_steps is of a rhythm whose delay is 1")
        if self.delay and self.is_stale:
            raise ValueError("a delay is of sums, and with staleness other than 0 nothing is summed")
        return self
