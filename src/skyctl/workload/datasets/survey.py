"""A look through the records before a run: what is wrong with them, how much there is, and one sample."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from skyctl.workload.datasets.row_order import BlockReader, Counts
from skyctl.workload.datasets.sample_maker import Sample, SampleMaker

SURVEYED_BYTES, SURVEY_S = 64 << 20, 3.0
"""So much is looked at, and so long: of many short records 64 MiB would take minutes."""
SHOWN_TOKENS = 200
LEARNT_MARKS = ("⟦", "⟧")


@dataclass(frozen=True)
class Survey:
    """The findings of a survey.

    Attributes:
        counts: of what was read.
        whole: all of the data was read, not only its beginning.
        read_bytes, data_bytes: what was read, and what there is.
        sample: the first sample as text: (piece, whether it is learnt).
        cut: the sample goes on behind what is shown.
        packing: rows hold several samples.
    """

    counts: Counts
    whole: bool
    sample: Sequence[tuple[str, bool]]
    cut: bool
    packing: bool
    context: int
    read_bytes: int = field(compare=False)
    data_bytes: int = field(compare=False)

    def to_dict(self) -> dict[str, int | bool]:
        """How much was found, as JSON values."""
        counts = self.counts
        return {
            "records": counts.records,
            "tokens": counts.tokens,
            "learnt": counts.learnt,
            "whole": self.whole,
        }

    def lines(self) -> list[str]:
        """The findings that the user is told, a line each; the sample is the last one."""
        counts = self.counts
        found = [
            f"data: {counts.records:,} records{'' if self.whole else self._part()}, "
            f"{counts.tokens:,} tokens, of which {counts.learnt:,} are learnt, in {counts.rows:,} "
            f"{'packed ' if self.packing else ''}rows of {self.context}"
        ]
        short = [
            f"{counts.truncated:,} are longer than a row and cut off" if counts.truncated else "",
            f"{counts.dropped:,} have no answer left and are dropped" if counts.dropped else "",
            f"{counts.bad:,} are bad and left out, the first: {counts.first_bad}" if counts.bad else "",
        ]
        if any(short):
            found.append(f"of these records {'; '.join(filter(None, short))}")
        begin, end = LEARNT_MARKS
        text = "".join(f"{begin}{piece}{end}" if learnt else piece for piece, learnt in self.sample)
        found.append(f"a sample; what stands in {begin}{end} is learnt: {text}{' …' if self.cut else ''}")
        return found

    def _part(self) -> str:
        read, every = self.read_bytes / 2**20, self.data_bytes / 2**20
        return f" in the first {read:,.1f} MiB of {every:,.1f}"


def survey_records(
    reader: BlockReader,
    on_progress: Callable[[str], None] = lambda _text: None,
    clock: Callable[[], float] = time.monotonic,
) -> Survey:
    """Reads the data as training will: all of it, or as much as 64 MiB and ``SURVEY_S`` allow.

    Args:
        on_progress: told how far it is.
        clock: seconds.

    Raises:
        WorkloadError: a record can't be used, and is not to be left out; names file and line.
    """
    every = left = min(SURVEYED_BYTES, reader.data_bytes)
    blocks, began = iter(reader.blocks), clock()
    spent = 0.0
    while left > 0 and spent < SURVEY_S and (block := next(blocks, None)) is not None:
        reader.rows(block)
        left -= block[2] - block[1]
        spent = clock() - began
        done = max(1 - max(0, left) / every, min(1.0, spent / SURVEY_S))
        on_progress(f"looking through the records: {done:.0%}")
    first = reader.first_sample
    shown = [] if first is None else _pieces(first, reader.maker)
    return Survey(
        replace(reader.counts),
        next(blocks, None) is None,
        shown,
        first is not None and len(first.ids) > SHOWN_TOKENS,
        reader.options.packing,
        reader.maker.context,
        every - left,
        reader.data_bytes,
    )


def _pieces(sample: Sample, maker: SampleMaker) -> list[tuple[str, bool]]:
    both = list(zip(sample.ids, sample.learnt, strict=True))[:SHOWN_TOKENS]
    return [
        (maker.decode([number for number, _ in run]), bool(learnt))
        for learnt, run in groupby(both, key=lambda one: one[1])
    ]
