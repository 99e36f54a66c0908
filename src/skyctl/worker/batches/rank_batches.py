"""Which part of every batch a rank's pipeline trains on, and what of it the launcher compares."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from skyctl.worker.batches.batch_sketch import BatchSketcher, sketch_batch
from skyctl.worker.rank_events import BatchSketch
from skyctl.workload.data import Batch, EpochPosition, slice_samples
from skyctl.workload.recipe import microbatch_sizes

if TYPE_CHECKING:
    from skyctl.worker.rank_order import RankOrder
    from skyctl.workload.workload import Workload


class RankBatches:
    """The microbatches of one pipeline, as each of its ranks knows them.

    Attributes:
        all_sizes: samples of each of the step's microbatches.
        sizes: samples of each of this pipeline's microbatches.
        streamed_sizes: samples of each microbatch that passes between stages: the first pipeline, which
            validates, has to pass on all of the step's.
        first_microbatch: the number of its first one in the step; owners' numbers go on from one to the next.
        share: the part of the step's microbatches that this pipeline has, above 0 and at most 1.

    Args:
        order: the rank's; its workload's batch size and seed are the step's.
    """

    def __init__(self, order: RankOrder, workload: Workload) -> None:
        self._order, self._workload, self._rounds = order, workload, order.rounds
        rounds = order.rounds
        self._batch_size, self._seed = order.workload.batch_size, order.workload.seed
        self.all_sizes = microbatch_sizes(self._batch_size, order.microbatches)
        first, stop = order.microbatch_range
        self.sizes = self.all_sizes[first:stop]
        keeps_share = order.pipeline and order.elastic is None
        self.streamed_sizes = self.sizes if keeps_share else self.all_sizes
        self.first_microbatch = first + (0 if rounds is None else rounds.index * len(self.all_sizes))
        self.share = len(self.sizes) / len(self.all_sizes)
        self._samples = sum(self.all_sizes[:first]), sum(self.all_sizes[:stop])
        self._compared = order.compare_batches

    @property
    def is_only_pipeline(self) -> bool:
        """Whether there is no pipeline beside this one."""
        return self._are_whole and self._rounds is None

    @property
    def are_owned(self) -> bool:
        """Whether this pipeline's data is its own."""
        return self._rounds is not None and self._rounds.owner is not None

    @property
    def compares_validation(self) -> bool:
        """Whether the launcher compares the first held-out batch of the pipeline's two ends."""
        return self._compares_ends and self._order.pipeline == 0

    def sketcher(self, first_step: int) -> BatchSketcher:
        """The reader and sketcher of this pipeline's samples of each batch, from that step or round on.

        If the workload can only read whole batches, they are cut here, and sketched whole.
        """
        position = EpochPosition()
        if self._rounds is not None:
            first_step *= self._rounds.steps
        cuts = not self._are_whole and self._workload.reads_whole_batches
        samples = (0, self._batch_size) if cuts else self._samples
        return BatchSketcher(
            self._workload.batches(first_step, *samples, position=position),
            position,
            seed=self._seed,
            first_step=first_step,
            values=None if self.are_owned else self._compared if cuts else self._compares_ends,
            cut=self._samples if cuts else None,
            is_part=not (self._are_whole or cuts),
        )

    def reader(self, step: int, first: int, stop: int) -> Iterator[Batch]:
        """From that step on, the samples of the step's microbatches [first, stop), whoever's they are."""
        samples = sum(self.all_sizes[:first]), sum(self.all_sizes[:stop])
        if not self._workload.reads_whole_batches:
            yield from self._workload.batches(step, *samples)
        for inputs, targets in self._workload.batches(step):
            yield slice_samples(inputs, *samples), slice_samples(targets, *samples)

    def sketch_of(self, sketcher: BatchSketcher, step: int) -> BatchSketch | None:
        """The sketch of a step's batch, or of a round's first one; None where it is not compared.

        An owner's never is.
        """
        if self._rounds is None:
            return sketcher.take(step)
        sketch = sketcher.take_some(step * self._rounds.steps, self._rounds.steps)
        return sketch if self._compared and not self.are_owned else None

    def sketch_validation(self) -> BatchSketch | None:
        """The sketch of the first held-out batch; None where there is none."""
        batch = next(self._workload.validation(), None)
        return sketch_batch(batch, self._seed, "validation") if batch is not None else None

    @property
    def _are_whole(self) -> bool:
        """Whether this pipeline trains on all samples of its batches."""
        return len(self.sizes) == len(self.all_sizes)

    @property
    def _compares_ends(self) -> bool:
        """Whether the launcher compares this stage's batches with those of its pipeline's other end."""
        ends = self._order.is_first, self._order.is_last
        return self._compared and not self.are_owned and any(ends) and not all(ends)
