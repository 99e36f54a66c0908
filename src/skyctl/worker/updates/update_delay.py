"""Which steps of a run settle, where updates are delayed by a step (DeDLOC, arXiv 2106.10207).

The gradients of step k are summed while step k + 1 computes, and applied after it. A step that *settles*
waits for its own sum and applies it before it ends, so that afterwards as many updates are done as steps. All
ranks of a run come to the same steps, from what they are told when it begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skyctl.worker.rank_order import SumOrder


@dataclass(frozen=True)
class UpdateDelay:
    """A run's delay of updates by one step.

    Attributes:
        steps: of the whole run; the last one settles.
        undelayed_steps: so many at its beginning settle.
        every: after every so many steps the weights are looked at (by a checkpoint, a validation), so that
            step settles; 0 or None: never.
    """

    steps: int
    undelayed_steps: int
    every: tuple[int | None, ...]

    @classmethod
    def from_order(cls, sync: SumOrder, steps: int, every: Sequence[int | None]) -> UpdateDelay | None:
        """The delay that a rank is ordered to keep; None: every step settles."""
        return cls(steps, sync.undelayed_steps, tuple(every)) if sync.delay else None

    def settles(self, step: int) -> bool:
        """Whether that step settles, whatever ranks agree on in the run."""
        done = step + 1
        looked_at = any(every and done % every == 0 for every in self.every)
        return step < self.undelayed_steps or done >= self.steps or looked_at
