"""The weights that nodes are sent: their own layers', in one file, or the places where a node has them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

from torch import Tensor

from skyctl.checkpoint.node import safetensors
from skyctl.errors import WorkloadError
from skyctl.workload.stored_weights import StoredWeights
from skyctl.workload.weight_files import ReadTensors


class ShippedWeights:
    """The weights that a node was sent: a safetensors file keyed ``<layer>.<own name>``, or a list of places.

    Args:
        path: the file, or the list (``write_weight_list``).

    Raises:
        RecordError: the file is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._modified_ns: dict[str, int] = {}
        with path.open("rb") as file:
            listed = file.read(len(WEIGHT_LIST_MAGIC)) == WEIGHT_LIST_MAGIC
        if listed:
            told = json.loads(path.read_bytes())
            self._places = {name: (Path(held), own) for name, (held, own) in told["tensors"].items()}
            self._modified_ns = told["modified_ns"]
        else:
            self._places = {name: (path, name) for name in safetensors.read_header(path).tensors}

    def layer(self, index: int) -> Mapping[str, Tensor]:
        """One layer's values by own name, on the CPU, read as they are asked for; those that are there.

        WorkloadError where a file of the node's own has changed since the launcher compared it.
        """
        start = f"{index}."
        names = [name for name in self._places if name.startswith(start)]
        return ReadTensors({name.removeprefix(start): partial(self._read, name) for name in names})

    def _read(self, name: str) -> Tensor:
        path, own = self._places[name]
        wanted = self._modified_ns.get(str(path))
        if wanted is not None and (not path.is_file() or path.stat().st_mtime_ns != wanted):
            raise WorkloadError(
                f"{path} has changed since it was compared with the launcher's weights",
                hint="leave a model's files as they are while a run begins; launch it again",
            )
        return safetensors.load(path, [own])[own]


WEIGHT_LIST_MAGIC = b'{"kind": "skyctl weights in place 1"'
"""So begins what a node is sent in the place of weights that it has."""


def write_weight_list(tensors: Mapping[str, tuple[str, str]], modified_ns: Mapping[str, int]) -> bytes:
    """The list of places that ``ShippedWeights`` reads.

    Args:
        tensors: by ``<layer>.<own name>``, the safetensors file on the node and the tensor's name there.
        modified_ns: by file that was not sent, when it was changed last.
    """
    rest = json.dumps({"tensors": tensors, "modified_ns": modified_ns})
    return WEIGHT_LIST_MAGIC + b", " + rest[1:].encode()


def write_layer_weights(
    stored: StoredWeights, layers: Sequence[int], path: Path, *, without: Collection[str] = ()
) -> None:
    """Writes the file that ``ShippedWeights`` reads, for those layers; ``without`` names what is left out.

    The tensors of a safetensors file are copied in chunks; of the rest one tensor is in memory at a time.

    Raises:
        SkyctlError: a weights file can't be read, or the disk is full.
    """
    sources: dict[str, tuple[Path, str]] = {}
    pieces: list[Path] = []
    try:
        for index in layers:
            values = stored.layer(index)
            for own, place in stored.places(index).items():
                name = f"{index}.{own}"
                if name in without:
                    continue
                if place is None:
                    pieces.append(path.with_name(f"{path.name}.{name}"))
                    safetensors.save(pieces[-1], {name: values[own]})
                sources[name] = place or (pieces[-1], name)
        safetensors.gather(sources, path)
    finally:
        for piece in pieces:
            piece.unlink(missing_ok=True)
