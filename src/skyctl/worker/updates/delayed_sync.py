"""Delayed updates: a step's gradients are summed while the next step computes, and applied after it.

A step's gradients are taken out of the parameters after its last backward, so that the next backwards make
new ones: there are two sets of gradients, and one of weights. Ranks reach their agreement about a step
in the background, too. So where a pipeline is told in step k that the run ends, all know it after step k + 1,
which is then the last. Which steps wait for their own sum (*settle*) is in ``update_delay``.
"""

from __future__ import annotations

import time
from typing import Any

from skyctl.errors import RunError
from skyctl.worker.sums.gradient_sync import GradientSync, SyncReport
from skyctl.worker.sums.group_sync import GroupSync
from skyctl.worker.sums.sum_codecs import FIXED32
from skyctl.worker.sums.sum_work import SumWork
from skyctl.worker.sums.summed_gradients import AGREED_FLAGS, DetachedGradients
from skyctl.worker.updates.update_delay import UpdateDelay


class DelayedSync(GradientSync):
    """One stage's part in each step's sum of gradients, where updates are delayed by a step.

    In a step that ``delays`` its caller calls ``change_over`` after the last backward, then ``settle`` where
    the step settles; in any other step it makes the calls of a ``GradientSync``.

    Args:
        delay: which steps settle.
        parts, options: as of ``GradientSync``.

    Raises:
        RunError: the format is ``fixed32``, which may have to make a step again when the next one is done.
        Otherwise as ``GradientSync``.
    """

    def __init__(self, delay: UpdateDelay, *parts: Any, **options: Any) -> None:
        if options.get("format") == FIXED32:
            raise RunError(f"{FIXED32} may have to make a step again, and with a delay the next one is done")
        super().__init__(*parts, **options)
        self._delay = delay
        self._pending: list[_PendingSum] = []

    def settles(self, step: int) -> bool:
        """Whether the step waits for its own sum, whatever ranks agree on."""
        return self._delay.settles(step)

    def delays(self, step: int) -> bool:
        """Whether the step ends with the sum of the step before, or without its own."""
        return bool(self._pending) or not self.settles(step)

    def begin(self, step: int, *, early: bool = True) -> None:
        """The step's last backward is next. Nothing is done where the step ``delays``."""
        if not self.delays(step):
            super().begin(step, early=early)

    def change_over(self, step: int, *, is_last: bool) -> SyncReport | None:
        """A step that ``delays`` has made its last backward: begins its sum, ends that of the step before.

        Parameters then have the sums of the step before as gradients; the report is of that sum. None: there
        was no such sum, and they have no gradients.

        Args:
            is_last: whether this pipeline was told that the run ends.

        Raises: as ``GradientSync.finish``.
        """
        following = [_PendingSum(group, step) for group in self._groups]
        report = self.settle() if self._pending else None
        for group_sync in following:
            group_sync.begin(is_last)
        self._pending = following
        return report

    def settle(self) -> SyncReport:
        """Waits for the sum that is under way, which parameters then have as gradients.

        Raises: as ``GradientSync.finish``.
        """
        ended = time.perf_counter()
        are_last = [group_sync.finish() for group_sync in self._pending]
        began = max(group_sync.sum_work.agreed_at for group_sync in self._pending)
        self._pending = []
        waited_s = time.perf_counter() - ended
        idle_s = min(waited_s, max(0.0, began - ended))  # some replica had not come so far
        return SyncReport(idle_s, waited_s - idle_s, any(are_last), repeats=False)


class _PendingSum:
    """One step's sum of one group, of gradients that are taken out of the parameters when it is made."""

    def __init__(self, group: GroupSync, step: int) -> None:
        self._group = group
        self.gradients = DetachedGradients(group.parameters)
        self.sum_work: SumWork = group.take_aside(step, self.gradients)

    def begin(self, is_last: bool) -> None:
        """No other sum of the group is under way any more."""
        own = bytes([is_last, False, *self.gradients.codes()])
        self._group.sums.begin(self.sum_work, len(own))
        self._group.sums.agree_later(own, self.gradients.largest_code)

    def finish(self) -> bool:
        """Waits for the sum, and gives it to the parameters; whether any replica was told to end."""
        self.sum_work.wait()
        self.gradients.finish(self.sum_work.agreed[AGREED_FLAGS:])
        return bool(self.sum_work.agreed[0])
