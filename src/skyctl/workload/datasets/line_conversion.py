"""Files of records of other kinds, written as JSON lines: JSON arrays, CSV and Parquet. No torch here.

One record is in memory at a time. A line of the file that is written is a record of the one that is read, so
that errors can count in either. A file that was written is removed when nobody reads it any more.
"""

from __future__ import annotations

import csv
import importlib
import json
import tempfile
import weakref
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from skyctl.errors import WorkloadError
from skyctl.workload.datasets.line_blocks import MAX_LINE_BYTES, cut_blocks, read_lines
from skyctl.workload.datasets.record_files import (
    LINE_SUFFIXES,
    RecordFile,
    find_record_files,
    read_file_list,
    shown_name,
    unreadable,
)
from skyctl.workload.datasets.record_kinds import FAULT_MARK

_PIECE_CHARACTERS = 1 << 20
_BLANK = " \t\r\n"


def open_records(data: Path) -> list[RecordFile]:
    """The files of ``--data`` as files of lines; on a node ``data`` is the list of those that it was sent.

    Raises:
        WorkloadError: a file can't be read, is damaged, or needs a package that is not installed.
    """
    try:
        listed = read_file_list(data)
        if listed is not None:
            return listed
        return [_as_lines(path, shown_name(data, path)) for path in find_record_files(data)]
    except OSError as exc:
        raise unreadable(str(data), exc) from exc


def _as_lines(path: Path, name: str) -> RecordFile:
    kind = path.suffix.lower()
    if kind in LINE_SUFFIXES or (kind == ".json" and not _is_array(path)):
        return RecordFile.of(path, name)
    made = _convert(path, name)
    return replace(RecordFile.of(made.path, name, "record" if kind == ".json" else "row"), source=made)


def first_lines(data: Path, path: Path, count: int) -> Iterator[tuple[str, bytes]]:
    """The first records of one file of ``--data``, each with what errors call it; nothing is converted.

    Raises:
        WorkloadError: the file can't be read, is empty or damaged, or needs a package that is not installed.
    """
    name, kind = shown_name(data, path), path.suffix.lower()
    try:
        if kind in LINE_SUFFIXES or (kind == ".json" and not _is_array(path)):
            file = RecordFile.of(path, name)
            lines: Iterator[bytes] = (
                line or b"" for _, line in read_lines(file, cut_blocks([file], 1 << 20)[0])
            )
            unit = "line"
        else:
            lines, unit = _READERS[kind](path, name), "record" if kind == ".json" else "row"
        found = False
        for number, line in enumerate(islice(lines, count), 1):
            found = True
            yield f"{name}, {unit} {number}", line
    except OSError as exc:
        raise unreadable(name, exc) from exc
    if not found:
        raise WorkloadError(f"the data {name} holds no records", hint="give a file with records to train on")


def _is_array(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")


class Converted:
    """A file of lines that was written here; it is removed with the last reference to this."""

    def __init__(self, path: Path, name: str) -> None:
        fd, out = tempfile.mkstemp(prefix="skyctl-records-", suffix=".jsonl")
        self.path = Path(out)
        weakref.finalize(self, self.path.unlink, missing_ok=True)
        with open(fd, "wb") as file:  # noqa: PTH123 - of a descriptor
            for line in _READERS[path.suffix.lower()](path, name):
                file.write(line + b"\n")


_CONVERTED: weakref.WeakValueDictionary[tuple[Path, int, int], Converted] = weakref.WeakValueDictionary()
"""Those in use, by the file that was read, its size and its time."""


def _convert(path: Path, name: str) -> Converted:
    found = path.stat()
    key = path, found.st_size, found.st_mtime_ns
    made = _CONVERTED.get(key) or Converted(path, name)
    _CONVERTED[key] = made
    return made


def _line(record: Any) -> bytes:
    """A record as JSON; what JSON has no type for, such as a date beside the text, becomes a text."""
    try:
        return json.dumps(record, ensure_ascii=False, separators=(",", ":"), default=str).encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which ``record_kinds`` names
        return json.dumps(record, separators=(",", ":"), default=str).encode()


def _array_lines(path: Path, name: str) -> Iterator[bytes]:
    """The elements of a JSON array, each as it stands there, in one line."""
    decoder = json.JSONDecoder(object_pairs_hook=_Pairs, parse_constant=_Constant)
    with _open_text(path) as file:
        text = _ArrayText(file, name)
        text.skip("[")
        number = 0
        while text.peek() != "]":
            if number:
                text.skip(",")
            number += 1
            yield _line(_written(text.element(decoder, number)))
        text.skip("]")
        if text.peek():
            raise _damaged(name, number, "something stands behind the array's end")


class _Pairs(list[tuple[str, Any]]):
    """An object with its keys as they stand there, repeated ones included."""


class _Constant(str):
    """NaN or Infinity, which are no JSON."""

    __slots__ = ()


def _written(value: Any) -> Any:
    """An element for ``_line``; what is no JSON becomes an object that ``parse_record`` refuses."""
    if isinstance(value, _Constant):
        return float("nan")
    if isinstance(value, _Pairs):
        names = [key for key, _ in value]
        if len(set(names)) != len(names):
            return _Repeated(value)
        return {key: _written(part) for key, part in value}
    return [_written(part) for part in value] if isinstance(value, list) else value


class _Repeated(dict[str, Any]):
    """An object that is written with its repeated keys, as ``json`` takes the items that it is told."""

    def __init__(self, pairs: _Pairs) -> None:
        super().__init__(pairs)
        self._pairs = [(key, _written(part)) for key, part in pairs]

    def items(self) -> Any:
        return self._pairs


class _ArrayText:
    """The text of a JSON array, read piece by piece."""

    def __init__(self, file: TextIO, name: str) -> None:
        self._file, self._name, self._text, self._at, self._number = file, name, "", 0, 0

    def peek(self) -> str:
        """The next character that is not blank; empty at the end."""
        while True:
            while self._at < len(self._text):
                if (found := self._text[self._at]) not in _BLANK:
                    return found
                self._at += 1
            if not self._more():
                return ""

    def skip(self, character: str) -> None:
        """Passes that character; WorkloadError where another one stands there."""
        if (found := self.peek()) != character:
            what = f"{found!r} stands where {character!r} must" if found else "the file ends within the array"
            raise _damaged(self._name, self._number + 1, what)
        self._at += 1

    def element(self, decoder: json.JSONDecoder, number: int) -> Any:
        """The element that comes next, the one of that number."""
        self._number = number
        self.peek()
        while True:
            try:
                value, stop = decoder.raw_decode(self._text, self._at)
            except (ValueError, RecursionError) as exc:
                reason = exc.msg if isinstance(exc, json.JSONDecodeError) else str(exc)
            else:
                if stop < len(self._text):  # else it may be a number's beginning
                    self._at = stop
                    return value
                reason = "the file ends within the array"
            if len(self._text) - self._at > MAX_LINE_BYTES:
                raise _damaged(self._name, number, f"{reason}, or it has more than {MAX_LINE_BYTES} bytes")
            if not self._more():
                raise _damaged(self._name, number, reason)

    def _more(self) -> bool:
        try:
            piece = self._file.read(_PIECE_CHARACTERS)
        except UnicodeDecodeError as exc:
            raise _damaged(self._name, self._number + 1, f"it is no UTF-8: {exc.reason}") from exc
        self._text, self._at = self._text[self._at :] + piece, 0
        return bool(piece)


def _open_text(path: Path) -> TextIO:
    return path.open(encoding="utf-8-sig", newline="")


def _damaged(name: str, number: int, what: str) -> WorkloadError:
    return WorkloadError(
        f"{name}, record {number}: {what}",
        hint=f"write the array anew, or as lines: jq -c '.[]' {name} > records.jsonl",
    )


def _csv_lines(path: Path, name: str) -> Iterator[bytes]:
    """The rows of a CSV file, under the names in its first row."""
    csv.field_size_limit(MAX_LINE_BYTES)
    with _open_text(path) as file:
        rows = csv.reader(file, strict=True)
        header: list[str] = []
        number = 0
        try:
            for row in rows:
                if not row:
                    continue
                if not header:
                    header = row
                    if len(set(header)) != len(header):
                        raise WorkloadError(f"{name}: its first row has a name twice")
                    continue
                number += 1
                if len(row) != len(header):
                    fault = f"it has {len(row)} fields, the first row names {len(header)}"
                    yield FAULT_MARK + fault.encode()
                else:
                    yield _line(dict(zip(header, row, strict=True)))
        except (csv.Error, UnicodeDecodeError) as exc:
            reason = f"no UTF-8: {exc.reason}" if isinstance(exc, UnicodeDecodeError) else str(exc)
            raise WorkloadError(
                f"{name}, row {number + 1}: it can't be read: {reason}", hint="save it anew as CSV in UTF-8"
            ) from exc


def _parquet_lines(path: Path, name: str) -> Iterator[bytes]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as exc:
        raise WorkloadError(
            f"{name}: Parquet files are read with pyarrow, which is not installed here",
            hint="pip install pyarrow, here alone; or write the records as JSON lines",
        ) from exc
    try:
        opened = parquet.ParquetFile(path)
        for batch in opened.iter_batches(batch_size=256):
            yield from map(_line, batch.to_pylist())
    except (ValueError, OSError) as exc:  # pyarrow's own errors are kinds of these
        raise WorkloadError(f"{name} can't be read as Parquet: {exc}", hint="write it anew") from exc


_READERS = {".json": _array_lines, ".csv": _csv_lines, ".parquet": _parquet_lines}
