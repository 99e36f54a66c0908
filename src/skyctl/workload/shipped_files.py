"""The files of a workload that nodes are sent: the user's modules, a config, token ids; and their digest.

A digest needs no torch: a workload that was measured is recognised without it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from skyctl.agent import node_cache
from skyctl.workload import ship_list, user_code
from skyctl.workload.hf import hub_folder as hub
from skyctl.workload.workload_spec import WorkloadSpec, resolve_source


def files_to_ship(spec: WorkloadSpec) -> dict[str, bytes]:
    """The files to send, by relative name; {} for built-in models.

    These are the user's file, the modules in its folder that it imports and the data files that are named to
    be shipped, or the config of an ``hf:`` folder; its tokenizer, too, where it trains on records.

    On a node the spec's ``path`` is then ``shipped_path``.
    """
    source = resolve_source(spec)
    if source.path is None:
        return {}
    if source.kind == "hf":
        return (hub.config_files if spec.records is None else hub.digested_files)(source.path)
    return ship_list.read_data_files(source.path, spec.ship) | user_code.imported_files(source.path)


def digest_data(spec: WorkloadSpec) -> str | None:
    """A text that changes with names and contents of the data files that are shipped; None: none are."""
    source = resolve_source(spec)
    files = ship_list.read_data_files(source.path, spec.ship) if source.path and source.kind == "file" else {}
    return node_cache.tree_digest(files) if files else None


def digest_workload(spec: WorkloadSpec) -> str:
    """A text that changes with the model's source and its dtype, not with batch size, seed or learning rate.

    Of the user's file it covers the modules beside it that it imports, not shipped data (``digest_data``); of
    an ``hf:`` folder config and tokenizer, not the weights. None of them is run.

    Raises:
        WorkloadError: a file is missing or can't be read, or has a syntax error.
    """
    source = resolve_source(spec)
    digest = hashlib.sha256(f"{source.canonical} {spec.dtype}".encode())
    files: Mapping[str, bytes] = {}
    if source.path is not None:
        read = hub.digested_files if source.kind == "hf" else user_code.imported_files
        files = read(source.path)
    for name, content in files.items():
        digest.update(f"\0{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


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
