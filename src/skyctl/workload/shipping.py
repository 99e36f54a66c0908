"""What of a workload has to travel to the nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skyctl.workload import usercode
from skyctl.workload.hf import source as hub
from skyctl.workload.model import make
from skyctl.workload.spec import WorkloadSpec, source_of

if TYPE_CHECKING:
    from skyctl.workload.hf.stored import Stored


def ship(spec: WorkloadSpec) -> dict[str, bytes]:
    """The user's file and the modules beside it that it imports, by relative name; the config of an
    ``hf:`` folder; {} for built-in models.

    On the node: the spec with ``path`` set to what ``shipped`` gives.
    """
    source = source_of(spec)
    if source.path is None:
        return {}
    return hub.ship(source.path) if source.kind == "hf" else usercode.files(source.path)


def shipped(spec: WorkloadSpec, folder: str) -> str:
    """The spec's ``path`` on a node where ``ship``'s files lie in ``folder``."""
    source = source_of(spec)
    return folder if source.kind == "hf" or source.path is None else f"{folder}/{source.path.name}"


def encoded(spec: WorkloadSpec, text: bytes | None) -> bytes | None:
    """A text as nodes are sent it: token ids where the folder of ``hf:`` has a tokenizer."""
    source = source_of(spec)
    if text is None or source.kind != "hf" or source.path is None:
        return text
    from skyctl.workload.hf.text import encode

    return encode(source.path, text)


def stored_weights(spec: WorkloadSpec) -> Stored | None:
    """The weights that lie in the folder of ``hf:``, by layer; None where all start at random."""
    source = source_of(spec)
    if source.kind != "hf":
        return None
    made = make(source, spec.seed).hub
    return made.stored if made is not None else None
