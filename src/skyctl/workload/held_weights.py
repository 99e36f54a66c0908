"""Which of the model's files a node has itself, so that nobody sends their tensors. No torch here.

A file of the same name may hold other values, so its name and size prove nothing: the node tells the SHA-256
of the header and of just the bytes that it would read, and the launcher compares it with its own file's.
Task: ``skyctl.workload.held_weights``.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from skyctl.agent.message_fields import ByteCount, MaxLength, Sha256
from skyctl.agent.node_cache import DIGEST_BLOCK_BYTES
from skyctl.agent.task_events import to_message
from skyctl.agent.task_orders import read_order
from skyctl.agent.task_runner import TaskChannel

PathText = Annotated[str, MaxLength(4096)]
_CACHED_MODEL = "models--"
"""So begins a model's folder in the Hub's cache."""


@dataclass(frozen=True)
class WantedFile:
    """A file of the launcher's that the node may have.

    Attributes:
        places: where it may be, absolute, below the node's home (``~/``), or in its Hub cache (``models--``).
        size: its bytes.
        pieces: the bytes that the node would read, (first, behind the last), header included.
    """

    places: tuple[PathText, ...]
    size: ByteCount
    pieces: tuple[tuple[ByteCount, ByteCount], ...]


@dataclass(frozen=True)
class FindWeights:
    """Say which of these files are here."""

    kind: ClassVar[str] = "weights"
    files: tuple[WantedFile, ...]


@dataclass(frozen=True)
class HeldFile:
    """A file that the node has, as it is now. ``sha256``: of its pieces, one after the other."""

    path: PathText
    modified_ns: int
    sha256: Sha256


@dataclass(frozen=True)
class HeldFiles:
    """The answer: what is here, in the order of the question; None: that file is not."""

    kind: ClassVar[str] = "result"
    files: tuple[HeldFile | None, ...]


def possible_places(path: Path) -> tuple[str, ...]:
    """The places where another machine may have this file, for ``WantedFile``."""
    found = [str(path)]
    if path.is_relative_to(Path.home()):
        found.append(f"~/{path.relative_to(Path.home())}")
    cached = next((i for i, part in enumerate(path.parts) if part.startswith(_CACHED_MODEL)), None)
    if cached is not None:
        found.append(str(Path(*path.parts[cached:])))
    return tuple(found)


def digest_pieces(path: Path, pieces: tuple[tuple[int, int], ...]) -> str:
    """SHA-256 of some bytes of a file, one piece after the other. OSError where it ends before."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for start, stop in pieces:
            file.seek(start)
            left = stop - start
            while left > 0:
                block = file.read(min(left, DIGEST_BLOCK_BYTES))
                if not block:
                    raise OSError(f"{path} ends too early")
                digest.update(block)
                left -= len(block)
    return digest.hexdigest()


def main(message: dict[str, Any], _channel: TaskChannel) -> dict[str, Any]:
    """Answers with ``HeldFiles``.

    Raises:
        MismatchError, RecordError: it can't follow the order.
    """
    order = read_order([FindWeights], message)
    return to_message(HeldFiles(tuple(map(_find, order.files))))


def _find(wanted: WantedFile) -> HeldFile | None:
    """The first file of that size in those places; None: there is none that can be read."""
    for place in wanted.places:
        for path in _paths(place):
            try:
                status = path.stat()
                if path.is_file() and status.st_size == wanted.size:
                    return HeldFile(str(path), status.st_mtime_ns, digest_pieces(path, wanted.pieces))
            except OSError:
                continue
    return None


def _paths(place: str) -> Iterator[Path]:
    if not place.startswith(_CACHED_MODEL):
        yield Path(place).expanduser()
        return
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    home = Path(os.environ.get("HF_HOME") or cache).expanduser()
    yield Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser() / place
