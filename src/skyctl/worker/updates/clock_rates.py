"""Learning rates by clock: pushes to a parameter server come out of order, and each has its own clock's."""

from __future__ import annotations

from typing import Any

import torch

from skyctl.worker.updates.lr_scheduler import LearningRateScheduler


class ClockRates:
    """Sets an optimizer's rates to those of a clock: of any that is not forgotten yet.

    Args:
        optimizer: whose groups are set.
        scheduler: of that optimizer, new or advanced to ``first``; it is advanced here alone.
        first: the first clock.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, scheduler: LearningRateScheduler, first: int
    ) -> None:
        self._optimizer, self._scheduler = optimizer, scheduler
        self._newest = first
        self._options = {first: self._current()}

    def set(self, clock: int) -> None:
        """Sets the rates of that clock. WorkloadError: the user's scheduler failed."""
        if clock > self._newest:
            self._put(self._newest)  # schedulers go on from what is there
        while self._newest < clock:
            self._scheduler.advance()
            self._newest += 1
            self._options[self._newest] = self._current()
        self._put(clock)

    def drop_before(self, first: int) -> None:
        """No clock before ``first`` is asked for again."""
        for clock in [clock for clock in self._options if clock < min(first, self._newest)]:
            del self._options[clock]

    def _current(self) -> list[dict[str, Any]]:
        moved = self._scheduler.options
        return [{k: v for k, v in group.items() if k in moved} for group in self._optimizer.param_groups]

    def _put(self, clock: int) -> None:
        for group, options in zip(self._optimizer.param_groups, self._options[clock], strict=True):
            group.update(options)
