"""The files of ``--data`` that hold records, and how a node is told of them. No torch here.

Records are read as JSON lines, whatever the user's files are: the launcher converts other kinds first
(``line_conversion``), record by record.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from skyctl.agent.node_cache import file_digest
from skyctl.errors import WorkloadError

LINE_SUFFIXES = (".jsonl", ".ndjson")
RECORD_SUFFIXES = (*LINE_SUFFIXES, ".json", ".csv", ".parquet")
FILE_LIST_MAGIC = b'{"kind": "skyctl record files 1"'
"""So begins what a node is sent in the place of the files: a list of them."""
_NO_RECORDS = ("dataset_info.json", "dataset_infos.json", "state.json")
"""The files that the library ``datasets`` writes beside the records of a folder."""


@dataclass(frozen=True)
class RecordOptions:
    """How records become samples.

    Attributes:
        kind: what the records are, one of ``record_kinds.KINDS``; all must be of that kind.
        packing: several samples share a row of ``context`` tokens, without attention across them.
        train_on_inputs: prompts and the user's turns are learnt, too.
        skip_bad: a record that can't be used is left out and counted; else it is an error.
    """

    kind: str
    packing: bool = True
    train_on_inputs: bool = False
    skip_bad: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The options as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RecordOptions:
        """The options that ``to_dict`` described."""
        return cls(**values)


@dataclass(frozen=True)
class RecordFile:
    """One file of records, a JSON object a line.

    Attributes:
        path: where it is on this machine.
        name: what errors call it, whatever it was converted from.
        unit: what errors count its records as: ``line``, ``record`` or ``row``.
        size: its bytes.
        modified_ns: when it was changed last; a file that has changed since is no longer read.
        source: what it was made of, held as long as it is read; None: the file is the user's own.
    """

    path: str
    name: str
    unit: str
    size: int
    modified_ns: int
    source: Any = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, path: Path, name: str, unit: str = "line") -> RecordFile:
        """The file with the size and time that it has now. Raises OSError where it is gone."""
        found = path.stat()
        return cls(str(path), name, unit, found.st_size, found.st_mtime_ns)

    def check_unchanged(self) -> None:
        """Raises WorkloadError where the file is gone or not as it was when the run began."""
        try:
            now = RecordFile.of(Path(self.path), self.name, self.unit)
        except OSError as exc:
            raise unreadable(self.name, exc) from exc
        if now != self:
            raise WorkloadError(
                f"{self.name} has changed since the run began to read it",
                hint="leave data as it is while a run trains on it; begin a new run with the new data",
            )


def find_record_files(data: Path) -> list[Path]:
    """The files of records that a path names: itself, or those within a folder, sorted by path."""
    if not data.is_dir():
        return [data] if data.suffix.lower() in RECORD_SUFFIXES else []
    found = (p for p in data.rglob("*") if p.suffix.lower() in RECORD_SUFFIXES and p.is_file())
    return sorted(
        p
        for p in found
        if p.name not in _NO_RECORDS and not any(n[0] in "._" for n in p.relative_to(data).parts)
    )


def digest_records(data: Path, options: RecordOptions) -> bytes:
    """A digest of all records and of how they are used."""
    digest = hashlib.sha256(json.dumps(options.to_dict(), sort_keys=True).encode())
    for path in find_record_files(data):
        digest.update(bytes.fromhex(digest_file(path)))
    return digest.digest()


def digest_file(path: Path) -> str:
    """SHA-256 of a file in hex; of one that has not changed it is found out once."""
    try:
        found = path.stat()
        return _digest_of(path, found.st_size, found.st_mtime_ns)
    except OSError as exc:
        raise unreadable(str(path), exc) from exc


@lru_cache(maxsize=4096)
def _digest_of(path: Path, _size: int, _modified_ns: int) -> str:
    return file_digest(path)


def write_file_list(files: Sequence[RecordFile]) -> bytes:
    """The list that a node is sent; ``read_file_list`` reads it there."""
    told = [{key: value for key, value in vars(file).items() if key != "source"} for file in files]
    rest = json.dumps({"files": told})
    return FILE_LIST_MAGIC + b", " + rest[1:].encode()


def is_file_list(path: Path) -> bool:
    """Whether a path is a list of files, as a node has it."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(FILE_LIST_MAGIC)) == FILE_LIST_MAGIC


def read_file_list(path: Path) -> list[RecordFile] | None:
    """The files of a list; None: the file is no list.

    The time of a file that was sent is the node's own, so it is taken as the file is now.
    """
    if not is_file_list(path):
        return None
    listed = [RecordFile(**one) for one in json.loads(path.read_bytes())["files"]]
    return [one if one.modified_ns else RecordFile.of(Path(one.path), one.name, one.unit) for one in listed]


def shown_name(data: Path, path: Path) -> str:
    """The name of a file of ``--data`` in errors: its own, or within a folder its place there."""
    return os.path.relpath(path, data.parent) if data.is_dir() else path.name


def unreadable(name: str, exc: OSError) -> WorkloadError:
    """The error for a file that the system can't read."""
    return WorkloadError(
        f"the data {name} can't be read: {exc.strerror or exc}", hint="give a readable file or folder"
    )
