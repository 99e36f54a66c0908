"""What running ranks report: steps, validations and checkpoints, gathered, judged, and passed on.

At each checkpoint, sketches show whether pipelines side by side still hold the same parameters. They start
alike and add the same sums, to the last bit; only their optimizers may differ in last bits, by processor. So
sketches are compared with a tolerance: far more than rounding ever comes to, far less than one update that
only one of them has made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from skyctl.checkpoint.node.replicator_events import ShardDigest
from skyctl.errors import RunError, SkyctlError, WorkloadError
from skyctl.run.batch_check import REPEATS, same_tensors, step_fault
from skyctl.run.callbacks import RunCallbacks
from skyctl.run.rank_failure import RankState
from skyctl.run.rank_spec import RankSpec
from skyctl.run.step_metrics import StepCollector
from skyctl.worker.rank_events import (
    CheckpointEvent,
    LayerSketches,
    RankEvent,
    RankResult,
    StepEvent,
    TensorSketch,
    ValidationEvent,
)

DRIFT_TOLERANCE = 5e-3
"""How far two copies of a parameter may be apart, relative to its norm; they are compared in float32."""


class RankReports:
    """Takes in what an attempt's ranks report, in the order in which it comes.

    Attributes:
        told: steps that another process has told of already.

    Args:
        specs: of the attempt's ranks, by rank.
        collected: where figures are kept.
        on_checkpoint: told after how many steps every rank has written its layers; by layer, its file.
        final: marks an error as one that another attempt would only meet again.
    """

    def __init__(
        self,
        specs: Sequence[RankSpec],
        collected: StepCollector,
        callbacks: RunCallbacks,
        on_checkpoint: Callable[[int, dict[int, ShardDigest]], None],
        final: Callable[[SkyctlError], SkyctlError],
    ) -> None:
        self.told = 0
        self._specs, self._collected, self._callbacks = specs, collected, callbacks
        self._on_checkpoint, self._final = on_checkpoint, final
        self._drifted: set[int] = set()

    def take(self, rank: RankState, event: RankEvent, *, tell: bool = True) -> None:
        """Takes in one event of a running rank.

        Args:
            tell: whether callbacks hear of it.

        Raises:
            RunError: the run's figures show that it can't go on.
        """
        if isinstance(event, StepEvent):
            self._collected.add(rank.spec.rank, event)
            rank.enter_phase(f"{self._collected.unit} {event.step + 1}")
            self._report_steps(tell)
        elif isinstance(event, ValidationEvent):
            if not math.isfinite(event.loss):
                error = RunError(
                    f"the validation loss after {self._collected.unit} {event.step + 1} is {event.loss}",
                    hint="the training loss is finite: look at what validation() gives, and at layers that "
                    "behave differently in eval()",
                )
                raise self._final(error)
            self._collected.add_validation(rank.spec.rank, event)
            self._report_steps(tell)
        elif isinstance(event, CheckpointEvent):
            if event.error and tell:
                self._callbacks.warn(f"{rank.name} could not write its checkpoint: {event.error}")
            shards = self._collected.add_checkpoint(rank.spec.rank, event)
            if shards is not None and tell:
                self._warn_of_drift(self._collected.checkpoint_events(event.step))
                self._on_checkpoint(event.step, shards)
        elif isinstance(event, RankResult):
            rank.result = event

    def check_beginnings(self, sketches: Mapping[int, LayerSketches]) -> None:
        """Compares the weights that ranks begin with, before they are told to start.

        Args:
            sketches: by rank, of the layers that it holds.

        Raises:
            WorkloadError: two ranks hold a layer, and with other weights.
        """
        first: dict[int, tuple[int, tuple[TensorSketch, ...]]] = {}
        for rank, layers in sorted(sketches.items()):
            for layer, mine in sorted(layers.items()):
                other, expected = first.setdefault(layer, (rank, mine))
                if not same_tensors(expected, mine, DRIFT_TOLERANCE):
                    here, there = self._specs[rank].device, self._specs[other].device
                    error = WorkloadError(
                        f"layer {layer} begins with other weights on {here} than on {there}: model() takes "
                        "numbers that no seed fixes, or files that differ",
                        hint="draw from torch's, NumPy's or Python's own generator, which skyctl seeds, and "
                        "not from numpy.random.default_rng() or the clock; or begin with --init-from FILE",
                    )
                    raise self._final(error)

    def _report_steps(self, tell: bool) -> None:
        """Hands out the steps that have ended."""
        for progress in self._collected.complete():
            events = self._collected.events_of(progress.step)
            if fault := step_fault(progress.step, progress.loss, events, self._specs):
                raise self._final(fault)
            if tell and events[0].batch is not None and events[0].batch.repeats:
                self._callbacks.note(REPEATS)
            if tell or progress.step >= self.told:
                self._callbacks.step(progress)

    def _warn_of_drift(self, events: Mapping[int, CheckpointEvent]) -> None:
        """Warns once of each device whose parameters are not those of the first that holds the layer."""
        first: dict[int, tuple[int, tuple[TensorSketch, ...]]] = {}
        for rank, event in sorted(events.items()):
            for layer, sketches in sorted(event.sketches.items()):
                other, expected = first.setdefault(layer, (rank, sketches))
                if rank not in self._drifted and not same_tensors(expected, sketches, DRIFT_TOLERANCE):
                    self._drifted.add(rank)
                    here, there = self._specs[rank].device, self._specs[other].device
                    self._callbacks.warn(
                        f"after {event.step} steps layer {layer} on {here} has drifted from that on {there}, "
                        "which is kept: an optimizer that draws random numbers, or a layer's own state, may "
                        "make their updates differ"
                    )
