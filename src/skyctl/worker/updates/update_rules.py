"""When a stage's weights follow from its gradients, and from those of other ranks.

The executor makes a step's forwards and backwards, and a rule does the rest. ``EachStep`` is the plain one;
``OneLate`` applies a step's sum after the next step, ``AsTheyCome`` leaves updates to a parameter server.
Rounds (``local_rounds``) make several steps by ``EachStep`` before weights are averaged.
"""

from __future__ import annotations

from collections.abc import Callable

from skyctl.worker.rank_events import SumSizes
from skyctl.worker.sums.gradient_sync import GradientSync, SyncReport
from skyctl.worker.trace.trace_recorder import SUM
from skyctl.worker.updates.delayed_sync import DelayedSync
from skyctl.worker.updates.predicted_weights import PredictedWeights
from skyctl.worker.updates.stage_update import StageUpdate
from skyctl.worker.updates.stale_sync import StaleSync
from skyctl.worker.updates.step_report import StepReport


class EachStep:
    """After each step's last backward, gradients are summed with other pipelines', and applied.

    Args:
        sync: sums the gradients; None: this stage's are all there are.
    """

    def __init__(self, update: StageUpdate, sync: GradientSync | StaleSync | None = None) -> None:
        self._update, self._sync = update, sync

    @property
    def by_microbatch(self) -> bool:
        """Whether gradients are taken after each microbatch, and a step may have to be made again."""
        return self._sync is not None and self._sync.by_microbatch

    @property
    def ended_by(self) -> int | None:
        """The rank of another pipeline that has told this one that the run ends; None: none has."""
        return None if self._sync is None else self._sync.ended_by

    @property
    def sizes(self) -> SumSizes | None:
        """The sizes of the sums, which a helper has to know; None: there are no sums."""
        return None if self._sync is None else self._sync.sizes

    def start_step(self, step: int, report: StepReport) -> None:  # noqa: ARG002 — others tell it
        """The step's first forward is next."""
        if self._sync is not None:
            self._sync.start_step()

    def end_microbatch(self) -> None:
        """A backward is over that was not the step's last."""
        if self._sync is not None:
            self._sync.end_microbatch()

    def begin(self, step: int, *, early: bool) -> None:
        """The step's last backward is next.

        Args:
            early: each layer's gradients are complete once it has passed them; False: all are after it.
        """
        if self._sync is not None:
            self._sync.begin(step, early=early)

    def finish(self, step: int, report: StepReport) -> bool:
        """The last backward is over: updates the weights.

        Returns:
            Whether the step's microbatches must be made again first; nothing is updated then.

        Raises:
            PeerLostError: a rank that gradients are summed with is gone.
            RunError: it has sent something else than what was expected, or the norm is not finite.
            WorkloadError: a gradient is sparse.
        """
        if self._sum(step, report):
            return True
        self._update.make(step, report)
        return False

    def average_figures(self, step: int) -> None:
        """Gives all replicas of this stage's layers the mean of their norms' running figures."""
        if self._sync is not None:
            with self._update.progress.waits(f"averaging running figures after step {step}"):
                self._sync.average_figures(step)

    def reset_residuals(self) -> None:
        """Drops what a run that resumes here would not have: it is to go on alike."""
        if self._sync is not None:
            self._sync.reset_residuals()

    def close(self) -> None:
        """Ends the threads; the connections must be closed before."""
        if self._sync is not None:
            self._sync.close()

    def _sum(self, step: int, report: StepReport) -> bool:
        """Sums the gradients; whether the step must be made again instead."""
        if self._sync is None:
            return False
        with self._update.progress.waits(f"step {step}, the sum of the gradients"):
            sync_report = self._sync.finish(is_last=report.is_last)
        self._count_sum(sync_report, report)
        report.is_last, report.ahead = sync_report.is_last, sync_report.ahead
        return sync_report.repeats

    def _count_sum(self, sync_report: SyncReport, report: StepReport) -> None:
        """Adds what was waited for a sum to the step's figures."""
        report.idle_s += sync_report.idle_s
        report.transfer_s += sync_report.transfer_s
        report.sync_s = (report.sync_s or 0.0) + sync_report.sync_s
        if self._update.recorder is not None:
            self._update.recorder.record_wait(0, sync_report.idle_s, sync_report.transfer_s, SUM)


class OneLate(EachStep):
    """A step's gradients are summed while the next step computes, and applied after it (``delayed_sync``).

    Args:
        predicted: the weights that steps are computed with; None: those that there are.
        after_update: called after an update by the gradients of the step before.
    """

    def __init__(
        self,
        update: StageUpdate,
        sync: DelayedSync,
        predicted: PredictedWeights | None,
        after_update: Callable[[], None],
    ) -> None:
        super().__init__(update, sync)
        self._delayed, self._predicted, self._after_update = sync, predicted, after_update

    def start_step(self, step: int, report: StepReport) -> None:
        """As ``EachStep.start_step``; the weights become the predicted ones."""
        super().start_step(step, report)
        if self._predicted is not None:
            report.optimizer_s += self._update.timer.run(self._predicted.enter).wall_s

    def finish(self, step: int, report: StepReport) -> bool:
        """The update by the step before's gradients, and, if the step settles, by its own.

        The step's own sum begins before either, and goes on beside the next step. Otherwise as
        ``EachStep.finish``.
        """
        sync, predicted, timer = self._delayed, self._predicted, self._update.timer
        if predicted is not None:
            report.optimizer_s += timer.run(predicted.leave).wall_s
        if not sync.delays(step):
            return super().finish(step, report)
        stops, report.is_last = report.is_last, False
        report.sync_s = 0.0
        with self._update.progress.waits(f"step {step}, the sum of the step before"):
            earlier = sync.change_over(step, is_last=stops)
        if earlier is not None:
            self._count_sum(earlier, report)
            report.is_last = earlier.is_last
            if predicted is not None:
                report.optimizer_s += timer.run(predicted.keep).wall_s
            self._update.make(step, report)
            self._after_update()
        report.is_applied = report.is_last or sync.settles(step)
        if report.is_applied:
            with self._update.progress.waits(f"step {step}, the sum of the gradients"):
                own = sync.settle()
            self._count_sum(own, report)
            report.is_last = report.is_last or own.is_last
            self._update.make(step, report)
            if predicted is not None:
                predicted.discard()
        return False


class AsTheyCome(EachStep):
    """A parameter server applies each rank's gradients as they come, and gives weights back (``stale_sync``).

    Each rank clips the gradients of its own share of the batch.
    """

    def finish(self, step: int, report: StepReport) -> bool:
        """Pushes the gradients, and pulls the weights of the next step. Raises as ``EachStep.finish``."""
        self._update.prepare(step, report)
        self._sum(step, report)
        return False
