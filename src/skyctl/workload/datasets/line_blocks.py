"""Files of lines as blocks of bytes that begin and end at line ends: read in any order, one at a time.

A file of any size is cut by a few reads around each cut, and never counted through. No torch here.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from skyctl.errors import WorkloadError
from skyctl.workload.datasets.record_files import RecordFile, unreadable

MAX_LINE_BYTES = 8 << 20
"""A longer record is none that can be trained on: a block with it has to be in memory."""
_SCAN_BYTES = 1 << 20
Block = tuple[int, int, int]
"""(the number of its file, its first byte, the first byte behind it)."""


def cut_blocks(files: Sequence[RecordFile], block_bytes: int) -> list[Block]:
    """All blocks, in the files' order; each has ``block_bytes`` and what is left of its last line.

    Raises:
        WorkloadError: a file can't be read, or is empty.
    """
    found = []
    for number, record_file in enumerate(files):
        try:
            with Path(record_file.path).open("rb") as file:
                start = _after_mark(file)
                if start >= record_file.size:
                    raise WorkloadError(
                        f"the data {record_file.name} is empty", hint="give a file with records to train on"
                    )
                while start < record_file.size:
                    stop = _line_end(file, min(start + block_bytes, record_file.size), record_file.size)
                    found.append((number, start, stop))
                    start = stop
        except OSError as exc:
            raise unreadable(record_file.name, exc) from exc
    return found


def _after_mark(file: BinaryIO) -> int:
    """The place behind a byte order mark of UTF-8."""
    return len(codecs.BOM_UTF8) if file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8 else 0


def _line_end(file: BinaryIO, at: int, size: int) -> int:
    """The first place from ``at`` on that is behind a line's end, or the file's."""
    file.seek(at - 1)
    while at < size:
        piece = file.readline(_SCAN_BYTES)
        if piece.endswith(b"\n") or not piece:
            return file.tell()
    return size


def read_lines(file: RecordFile, block: Block) -> Iterator[tuple[int, bytes | None]]:
    """The lines of a block that are not blank: (where it begins in the file, its bytes without the end).

    None in the place of the bytes: the line has more than ``MAX_LINE_BYTES``.

    Raises:
        WorkloadError: the file can't be read.
    """
    _, at, stop = block
    try:
        with Path(file.path).open("rb") as opened:
            opened.seek(at)
            while at < stop:
                line = opened.readline(MAX_LINE_BYTES + 1)
                if not line:
                    return
                began, at = at, at + len(line)
                if len(line) <= MAX_LINE_BYTES or line.endswith(b"\n"):
                    if line.strip():
                        yield began, line.rstrip(b"\r\n")
                    continue
                while line and not line.endswith(b"\n"):
                    line = opened.readline(_SCAN_BYTES)
                    at += len(line)
                yield began, None
    except OSError as exc:
        raise unreadable(file.name, exc) from exc


def line_number(file: RecordFile, offset: int) -> int:
    """The number of the line that begins at a byte of the file, counted from 1."""
    number = 1
    with Path(file.path).open("rb") as opened:
        while offset > 0 and (piece := opened.read(min(offset, _SCAN_BYTES))):
            number += piece.count(b"\n")
            offset -= len(piece)
    return number
