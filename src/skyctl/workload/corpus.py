"""The text to train on, as bytes: a file, or the sources of this Python's standard library. No torch here."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from skyctl.errors import WorkloadError
from skyctl.workload.text_files import read_text

LIMIT_BYTES = 4 << 20
_SKIP = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"}


@lru_cache(maxsize=1)
def default_corpus() -> bytes:
    """The standard library's ``*.py`` files, sorted by relative name, cut at ``LIMIT_BYTES``.

    The same bytes each time on one machine; other Python versions give others, so the launcher makes it once
    and ships it. Tests and installed packages are left out.

    Raises:
        WorkloadError: this Python comes without its sources.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    names = sorted(_source_names(root))
    parts: list[bytes] = []
    room = LIMIT_BYTES
    for name in names:
        try:
            text = (root / name).read_bytes()
            text.decode()
        except (OSError, UnicodeDecodeError):
            continue
        parts.append(text[:room])
        room -= len(parts[-1])
        if room <= 0:
            break
    if room > LIMIT_BYTES - (64 << 10):
        raise WorkloadError(
            f"this Python keeps no sources of its standard library under {root}",
            hint="give a text: --data FILE.txt",
        )
    return b"".join(parts)


def _source_names(root: Path) -> Iterator[str]:
    """The relative names of the sources under a folder; what is left out is not even listed."""
    for folder, inside, files in os.walk(root):
        inside[:] = [name for name in inside if name not in _SKIP]
        place = Path(folder).relative_to(root)
        yield from ((place / name).as_posix() for name in files if name.endswith(".py") and name not in _SKIP)


@lru_cache(maxsize=2)
def read_corpus(data_path: str | None) -> bytes:
    """The whole text of ``--data`` as UTF-8; None: the default corpus. On a node also token ids, as they are.

    Raises:
        WorkloadError: the file can't be read, or is no text in an encoding that is certain.
    """
    return default_corpus() if data_path is None else read_text(Path(data_path))
