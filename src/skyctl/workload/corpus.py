"""The text to train on, as bytes: a file, or the sources of this Python's standard library. No torch here."""

from __future__ import annotations

import sysconfig
from functools import lru_cache
from pathlib import Path

from skyctl.errors import WorkloadError

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
    names = sorted(
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if not _SKIP.intersection(path.relative_to(root).parts)
    )
    parts: list[bytes] = []
    room = LIMIT_BYTES
    for name in names:
        try:
            text = (root / name).read_bytes()
        except OSError:
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


@lru_cache(maxsize=2)
def read_corpus(data_path: str | None) -> bytes:
    """The whole text of ``--data``; None: the default corpus.

    Raises:
        WorkloadError: the file can't be read.
    """
    if data_path is None:
        return default_corpus()
    try:
        return Path(data_path).read_bytes()
    except OSError as exc:
        raise WorkloadError(f"the text {data_path} can't be read: {exc.strerror or exc}") from exc
