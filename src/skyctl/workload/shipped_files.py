"""What nodes are sent of a workload: text, the user's modules, a config, token ids, stored weights."""

from __future__ import annotations

import sysconfig
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from skyctl.errors import WorkloadError
from skyctl.workload import user_code
from skyctl.workload.hf import hub_folder as hub
from skyctl.workload.layered_model import make_model
from skyctl.workload.workload_spec import WorkloadSpec, resolve_source

if TYPE_CHECKING:
    from skyctl.workload.hf.stored_weights import StoredWeights


LIMIT_BYTES = 4 << 20

_SKIP = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"}


def files_to_ship(spec: WorkloadSpec) -> dict[str, bytes]:
    """The files to send, by relative name; {} for built-in models.

    These are the user's file and the modules in its folder that it imports, or the config of an ``hf:``
    folder.

    On a node the spec's ``path`` is then ``shipped_path``.
    """
    source = resolve_source(spec)
    if source.path is None:
        return {}
    return hub.config_files(source.path) if source.kind == "hf" else user_code.imported_files(source.path)


def shipped_path(spec: WorkloadSpec, folder: str) -> str:
    """The spec's ``path`` on a node that has the shipped files in ``folder``."""
    source = resolve_source(spec)
    return folder if source.kind == "hf" or source.path is None else f"{folder}/{source.path.name}"


def encode_text(spec: WorkloadSpec, text: bytes | None) -> bytes | None:
    """A text as it is sent to nodes: as token ids where the folder of ``hf:`` has a tokenizer."""
    source = resolve_source(spec)
    if text is None or source.kind != "hf" or source.path is None:
        return text
    from skyctl.workload.hf.token_data import tokenize

    return tokenize(source.path, text)


def find_stored_weights(spec: WorkloadSpec) -> StoredWeights | None:
    """The stored weights in the folder of ``hf:``, by layer; None where all start at random."""
    source = resolve_source(spec)
    if source.kind != "hf":
        return None
    made = make_model(source, spec.seed).hub
    return made.stored if made is not None else None


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
