"""The best validation of a run so far, as this rank knows it."""

from __future__ import annotations

import math

from skyctl.worker.rank_order import BestValidation


class BestSoFar:
    """The lowest validation loss so far; ranks that may have to validate one day are told of others'.

    Args:
        validation: of the run before, which this one goes on from; None: there was none.
    """

    def __init__(self, validation: BestValidation | None = None) -> None:
        self.validation = validation

    @property
    def step(self) -> int:
        """How many steps were done then; 0: there was no validation."""
        return 0 if self.validation is None else self.validation.step

    @property
    def loss(self) -> float:
        """Infinite if there was none."""
        return math.inf if self.validation is None else self.validation.loss

    def note(self, step: int, loss: float) -> bool:
        """Takes in a validation after so many steps; whether it is the best one so far."""
        is_best = self.validation is None or loss < self.validation.loss
        if is_best:
            self.validation = BestValidation(step, loss)
        return is_best
