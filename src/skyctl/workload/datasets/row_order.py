"""The rows that a model is trained on, in an order that the seed fixes, from files of any size.

A block of lines is read, rendered and packed by itself, so the rows of one are the same in every epoch. Some
blocks from all over the files are a group; groups follow each other, and the rows of a group are shuffled.
Two groups are in memory at a time, and small data as a whole. To begin in the middle of an epoch, the
rows before are counted, block by block, not trained on; a run's nodes keep those counts as long as it lasts.
"""

from __future__ import annotations

import random
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from skyctl.errors import WorkloadError
from skyctl.workload.datasets.line_blocks import MAX_LINE_BYTES, Block, cut_blocks, line_number, read_lines
from skyctl.workload.datasets.packed_rows import pack
from skyctl.workload.datasets.record_files import RecordFile, RecordOptions
from skyctl.workload.datasets.record_kinds import BadRecordError, parse_record, read_source
from skyctl.workload.datasets.sample_maker import Sample, SampleMaker

LEAST_BLOCK_BYTES, MOST_BLOCK_BYTES = 128 << 10, 2 << 20
BLOCK_ROWS_BYTES = 256
"""A block has about so many bytes for each token of a row: 64 rows of text, so that packing wastes little."""
GROUP_BYTES = 1 << 20
LEAST_GROUP_BLOCKS = 4
KEPT_BLOCKS = 32
HELD_OUT_OF = 20
"""One record in so many is held out for validation, told by its place in the file."""

Row = list[Sample]


@dataclass
class Counts:
    """The counts over the records that were read.

    Attributes:
        records: those read, bad ones included.
        tokens: of all samples, after truncation.
        learnt: of these the targets of the loss.
        truncated: samples that were longer than a row.
        dropped: samples without a target, after truncation.
        bad: records that were left out with ``skip_bad``.
        first_bad: what was wrong with the first of them, and where.
    """

    records: int = 0
    tokens: int = 0
    learnt: int = 0
    truncated: int = 0
    dropped: int = 0
    bad: int = 0
    rows: int = 0
    first_bad: str | None = None


@dataclass
class BlockReader:
    """Makes the rows of blocks.

    Args:
        held_out: which records are read: False: those that are trained on; True: those that are held out;
            None: all, for none is held out.
        row_counts: a file that keeps how many rows each block has, for who begins later; None: nobody does.

    Attributes:
        blocks: all blocks of the files.
        data_bytes: what is in them.
        counts: of all that was read so far; a block that is read again counts again.
        first_sample: the first one that was made.
    """

    files: Sequence[RecordFile]
    options: RecordOptions
    maker: SampleMaker
    held_out: bool | None = None
    row_counts: Path | None = None
    counts: Counts = field(default_factory=Counts)
    first_sample: Sample | None = None

    def __post_init__(self) -> None:
        wanted = BLOCK_ROWS_BYTES * self.maker.context
        self.block_bytes = min(MOST_BLOCK_BYTES, max(LEAST_BLOCK_BYTES, wanted))
        self.blocks = cut_blocks(self.files, self.block_bytes)
        self.data_bytes = sum(stop - start for _, start, stop in self.blocks)

    def rows(self, block: Block) -> list[Row]:
        """The rows of one block, in a fixed order.

        Raises:
            WorkloadError: a record can't be used, and is not to be left out; names file and line.
        """
        file = self.files[block[0]]
        file.check_unchanged()
        places, sources = [], []
        for place, line in read_lines(file, block):
            if self.held_out is not None and self.held_out != _is_held_out(block[0], place):
                continue
            self.counts.records += 1
            try:
                if line is None:
                    raise BadRecordError(
                        f"it has more than {MAX_LINE_BYTES >> 20} MiB",
                        "cut it into several records, or leave such records out: --skip-bad",
                    )
                sources.append(read_source(parse_record(line), self.options.kind))
                places.append(place)
            except BadRecordError as exc:
                self._bad(file, place, exc)
        kept = []
        for place, made in zip(places, self.maker.make(sources), strict=True):
            if isinstance(made, BadRecordError):
                self._bad(file, place, made)
                continue
            self.counts.truncated += made.truncated
            if not made.learnt_tokens:
                self.counts.dropped += 1
                continue
            self.counts.tokens += len(made.ids)
            self.counts.learnt += made.learnt_tokens
            kept.append(made)
            self.first_sample = self.first_sample or made
        rows = [[sample] for sample in kept]
        if self.options.packing:
            rows = [[kept[n] for n in row] for row in pack([len(s.ids) for s in kept], self.maker.context)]
        self.counts.rows += len(rows)
        return rows

    def _bad(self, file: RecordFile, place: int, exc: BadRecordError) -> None:
        counts = self.counts
        if self.options.skip_bad and counts.first_bad is not None:
            counts.bad += 1
            return
        what = f"{file.name}, {file.unit} {line_number(file, place)}: {exc.what}"
        if not self.options.skip_bad:
            raise WorkloadError(what, hint=exc.hint) from exc
        counts.bad += 1
        counts.first_bad = what


def _is_held_out(file: int, place: int) -> bool:
    return zlib.crc32(f"{file} {place}".encode()) % HELD_OUT_OF == 0


class RowOrder:
    """The rows of all blocks, epoch after epoch, each epoch in an order of its own.

    Args:
        reader: what makes a block's rows.
    """

    def __init__(self, reader: BlockReader, seed: int) -> None:
        self._reader, self._seed = reader, seed
        self._sizes: dict[Block, int] = self._known_sizes()
        self._kept: OrderedDict[Block, list[Row]] = OrderedDict()
        self._group = max(LEAST_GROUP_BLOCKS, GROUP_BYTES // reader.block_bytes)

    def rows(self, first: int) -> Iterator[Row]:
        """All rows from that one on, counted through all epochs, without end.

        Raises:
            WorkloadError: there is no row in all of the data, or a record can't be used.
        """
        groups = self._groups()
        left = first
        at: tuple[int, int, list[Block]] = next(groups)
        while True:
            epoch, number, blocks = at
            size = sum(map(self._size, blocks))
            if number == 0 and all(block in self._sizes for block in self._reader.blocks):
                total = sum(self._sizes.values())
                if not total:
                    raise self._nothing()
                skipped, left = divmod(left, total)
                if skipped:
                    groups = self._groups(epoch + skipped)
                    at = next(groups)
                    continue
            if left < size:
                break
            left -= size
            at = next(groups)
        ready = [self._rows(block) for block in at[2]]
        while True:
            rows = self._shuffled(at, ready)
            following = next(groups)
            ready = []
            for place, row in enumerate(rows[left:], left + 1):
                yield row
                # a part of the next group after each row, so that no step has to wait for all of it
                while len(ready) < len(following[2]) * place // len(rows):
                    ready.append(self._rows(following[2][len(ready)]))
            ready += [self._rows(block) for block in following[2][len(ready) :]]
            at, left = following, 0
            if at[1] == 0 and not any(self._sizes.values()):
                raise self._nothing()

    def _groups(self, first_epoch: int = 0) -> Iterator[tuple[int, int, list[Block]]]:
        """(epoch, the group's number in it, its blocks), without end."""
        epoch = first_epoch
        while True:
            blocks = list(self._reader.blocks)
            random.Random(f"skyctl records {self._seed} {epoch}").shuffle(blocks)  # noqa: S311
            for number, start in enumerate(range(0, len(blocks), self._group)):
                yield epoch, number, blocks[start : start + self._group]
            epoch += 1

    def _shuffled(self, group: tuple[int, int, list[Block]], ready: list[list[Row]]) -> list[Row]:
        rows = [row for part in ready for row in part]
        random.Random(f"skyctl rows {self._seed} {group[0]} {group[1]}").shuffle(rows)  # noqa: S311
        return rows

    def _size(self, block: Block) -> int:
        if block not in self._sizes:
            self._rows(block)
        return self._sizes[block]

    def _rows(self, block: Block) -> list[Row]:
        if block in self._kept:
            self._kept.move_to_end(block)
            return self._kept[block]
        rows = self._reader.rows(block)
        self._keep_size(block, len(rows))
        self._kept[block] = rows
        if len(self._kept) > KEPT_BLOCKS:
            self._kept.popitem(last=False)
        return rows

    def _known_sizes(self) -> dict[Block, int]:
        """The sizes that other processes of this run on this node have found; passes over a torn line."""
        file = self._reader.row_counts
        if file is None or not file.is_file():
            return {}
        found: dict[Block, int] = {}
        for line in file.read_text().splitlines():
            held_out, *numbers = line.split(" ")
            if held_out == str(self._reader.held_out) and len(numbers) == 5:
                number, start, stop, size = map(int, numbers[:4])
                found[number, start, stop] = size
        return {block: found[block] for block in self._reader.blocks if block in found}

    def _keep_size(self, block: Block, size: int) -> None:
        if block in self._sizes:
            return
        self._sizes[block] = size
        if self._reader.row_counts is not None:
            with self._reader.row_counts.open("a") as file:
                file.write(f"{self._reader.held_out} {block[0]} {block[1]} {block[2]} {size} .\n")

    def _nothing(self) -> WorkloadError:
        counts = self._reader.counts
        use = "validate" if self._reader.held_out else "train"
        return WorkloadError(
            f"the data has nothing to {use} on: of {counts.records} records {counts.bad} are bad and "
            f"{counts.dropped} have no answer within {self._reader.maker.context} tokens",
            hint="a larger context (hf:DIR,context=N), or more data",
        )
