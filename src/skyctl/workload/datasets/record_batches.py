"""Batches of records: rows of token ids, what of them is learnt, and where in a row each sample begins.

The loss is the mean over the learnt tokens of the whole batch. A worker weighs the loss of a microbatch by
its share of the samples; so each sample carries what makes those weighed losses add up to just that mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch

from skyctl.workload.data import Batch, BatchExample, TensorExample
from skyctl.workload.datasets.row_order import BlockReader, Row, RowOrder
from skyctl.workload.loss_functions import IGNORED_TARGET


class RecordData:
    """The batches of records; every batch is the same for one seed, on every node and from any step on.

    Inputs are ids, int64 [samples, context]; of packed rows (ids, positions), where positions count from 0
    in each sample. Targets are {"labels": int64 [samples, context], "tokens": float32 [samples]}: the same
    ids, ``IGNORED_TARGET`` where nothing is learnt, and the learnt tokens of the whole batch for each of its
    samples.
    """

    def __init__(self, reader: BlockReader, batch_size: int, seed: int) -> None:
        self._order, self._batch_size = RowOrder(reader, seed), batch_size
        self._context, self._padding = reader.maker.context, reader.maker.padding
        self._packing = reader.options.packing

    def batches(self, first_step: int, start: int, stop: int) -> Iterator[Batch]:
        """Samples [start, stop) of every step's batch from ``first_step`` on, without end."""
        rows = self._order.rows(first_step * self._batch_size)
        while True:
            batch = list(islice(rows, self._batch_size))
            learnt = sum(sample.learnt_tokens for row in batch for sample in row)
            yield self._tensors(batch[start:stop], learnt / self._batch_size)

    def _tensors(self, rows: Sequence[Row], tokens: float) -> Batch:
        shape = (len(rows), self._context)
        ids = torch.full(shape, self._padding)
        labels = torch.full(shape, IGNORED_TARGET)
        positions = torch.arange(self._context).repeat(len(rows), 1)
        for number, row in enumerate(rows):
            at = 0
            for sample in row:
                stop = at + len(sample.ids)
                made = torch.frombuffer(sample.ids, dtype=torch.int32).long()
                learnt = torch.frombuffer(bytearray(sample.learnt), dtype=torch.bool)
                ids[number, at:stop] = made
                labels[number, at:stop] = made.where(learnt, IGNORED_TARGET)
                positions[number, at:] = torch.arange(self._context - at)
                at = stop
            positions[number, at:] = torch.arange(self._context - at)  # what fills it up is a sample, too
        inputs = (ids, positions) if self._packing else ids
        return inputs, {"labels": labels, "tokens": torch.full((len(rows),), tokens)}


def make_record_example(context: int, vocabulary: int, *, packing: bool) -> BatchExample:
    """The shapes, dtypes and ranges of one sample of ``RecordData``'s batches, without reading a record.

    Args:
        context: tokens of a row.
        vocabulary: how many ids the model knows.
        packing: inputs have positions, too.
    """
    ids = TensorExample((context,), "int64", 0, vocabulary - 1)
    tokens = TensorExample((), "float32", 0, 1)
    positions = TensorExample((context,), "int64", 0, context - 1)
    both: Any = {"tuple": [None, None]}
    return BatchExample(
        (ids, positions) if packing else (ids,),
        (ids, tokens),
        both if packing else None,
        {"dict": {"labels": None, "tokens": None}},
    )
