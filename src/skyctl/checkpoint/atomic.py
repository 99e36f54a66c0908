"""Files that are there whole or not at all, with their SHA-256. Standard library only."""

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

_NUMBERS = itertools.count()
_PART = re.compile(r"\..+\.(\d+)-\d+\.part")


@dataclass(frozen=True)
class Written:
    """A whole file: its size, and its SHA-256 in hex."""

    size_bytes: int
    sha256: str


class Output:
    """What is being written; counts and digests it on the way."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self.size_bytes = 0

    def write(self, data: bytes | memoryview) -> int:
        """Writes all of it."""
        self._hash.update(data)
        count = self._file.write(data)
        self.size_bytes += count
        return count

    @property
    def written(self) -> Written:
        """What has been written so far."""
        return Written(self.size_bytes, self._hash.hexdigest())


@contextmanager
def writing(path: Path, mode: int = 0o666) -> Iterator[Output]:
    """A file beside ``path``, which takes its place when the block ends; an exception removes it.

    It is on the disk before it has the name: neither a kill nor a power failure leaves half of it there.

    Args:
        mode: its permissions, less the umask.

    Raises:
        SkyctlError: the disk is full or not writable.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}-{next(_NUMBERS)}.part")
    try:
        try:
            with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                yield Output(file)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except BaseException:
            with suppress(FileNotFoundError):
                part.unlink()
            raise
    except OSError as exc:
        raise SkyctlError(
            f"{path} can't be written: {exc.strerror or exc}",
            hint="free space there, or choose another folder",
        ) from exc


def sync_folder(folder: Path) -> None:
    """Its names to the disk, where the system can."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove_parts(folder: Path) -> None:
    """Removes what processes that are gone were still writing there."""
    with suppress(OSError):
        for entry in list(folder.iterdir()):
            found = _PART.fullmatch(entry.name)
            if found is not None and not _runs(int(found[1])):
                entry.unlink(missing_ok=True)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True
