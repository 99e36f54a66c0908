"""Writes files atomically, whole or not at all, and computes their SHA-256. Standard library only."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from skyctl.errors import SkyctlError

_COUNTER = itertools.count()
_PARTIAL_NAME = re.compile(r"\..+\.(\d+)-\d+\.part")


class UnwritableError(SkyctlError):
    """A file can't be written on this machine: its disk is full, or it is not to be written to."""


@dataclass(frozen=True)
class FileDigest:
    """The size of a whole file, and its SHA-256 in hex."""

    size_bytes: int
    sha256: str


class HashingWriter:
    """A file being written; counts and hashes its bytes on the way."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self.size_bytes = 0

    def write(self, data: bytes | memoryview) -> int:
        """Writes all of ``data``; returns how many bytes that were."""
        self._hash.update(data)
        count = self._file.write(data)
        self.size_bytes += count
        return count

    def flush(self) -> None:
        """Hands what was written to the system."""
        self._file.flush()

    @property
    def digest(self) -> FileDigest:
        """Size and SHA-256 of what has been written so far."""
        return FileDigest(self.size_bytes, self._hash.hexdigest())


@contextmanager
def atomic_writer(path: Path, mode: int = 0o666) -> Iterator[HashingWriter]:
    """Opens a temporary file beside ``path``, renamed to ``path`` where the block ends without an exception.

    It is on the disk before it has the name: neither a kill nor a power failure leaves half a file there.

    Args:
        mode: its permissions, less the umask.

    Raises:
        UnwritableError: the disk is full or not writable.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}-{next(_COUNTER)}.part")
    try:
        try:
            with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                yield HashingWriter(file)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except BaseException:
            with suppress(FileNotFoundError):
                part.unlink()
            raise
    except OSError as exc:
        raise UnwritableError(
            f"{path} can't be written: {exc.strerror or exc}",
            hint="free space there, or choose another folder",
        ) from exc


def sync_folder(folder: Path) -> None:
    """Writes the folder's entries to the disk, so that a rename survives a power failure; best effort."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove_partial_files(folder: Path) -> None:
    """Removes the temporary files of writers whose processes have ended."""
    with suppress(OSError):
        for entry in list(folder.iterdir()):
            found = _PARTIAL_NAME.fullmatch(entry.name)
            if found is not None and not _is_alive(int(found[1])):
                entry.unlink(missing_ok=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True
