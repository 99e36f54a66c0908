"""Reads the weights beside a config.json: found by name, one layer at a time.

Files as ``save_pretrained`` writes them: ``model.safetensors`` or ``pytorch_model.bin``, or several of either
with an ``….index.json``. Names may lack the base model's prefix, or be of BERT's first years (gamma, beta).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from skyctl.checkpoint import safetensors
from skyctl.errors import RecordError, WorkloadError

WEIGHT_FILE_NAMES = ("model.safetensors", "pytorch_model.bin")
_OLD_SUFFIXES = ((".LayerNorm.weight", ".LayerNorm.gamma"), (".LayerNorm.bias", ".LayerNorm.beta"))


def weight_files(folder: Path) -> dict[str, Path] | None:
    """By the tensor's name, the file that holds it; None where the folder has no weights.

    Raises:
        WorkloadError: an index or a file can't be read.
    """
    for single in WEIGHT_FILE_NAMES:
        index = folder / f"{single}.index.json"
        if (folder / single).is_file():
            return dict.fromkeys(_tensor_names(folder / single), folder / single)
        if index.is_file():
            try:
                named = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                return {str(name): folder / str(file) for name, file in named.items()}
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
                raise WorkloadError(f"{index} is no index of weights: {exc}") from exc
    return None


class StoredWeights:
    """The weights of a folder, read by layer.

    Args:
        names: per layer, own name → name in the library's model (``hub_layers.library_names``).
        shapes: per layer, own name → shape.
        prefix: of the base model, which names in files may lack.
        ties: name → the name whose values it starts from where the files lack it.

    Attributes:
        fresh: names in the library's model that no file holds; their values start at random.
    """

    def __init__(
        self,
        folder: Path,
        names: Sequence[Mapping[str, str]],
        shapes: Sequence[Mapping[str, Sequence[int]]],
        *,
        prefix: str,
        ties: Mapping[str, str],
    ) -> None:
        self.folder = folder
        self._files = weight_files(folder) or {}
        self._prefix, self._ties = prefix, ties
        self._wanted: list[dict[str, str]] = []
        self.fresh: list[str] = []
        for layer, named in enumerate(names):
            found = {own: self._find(name) for own, name in named.items()}
            self._wanted.append({own: name for own, name in found.items() if name is not None})
            missing = [named[own] for own, name in found.items() if name is None]
            self.fresh += missing
            if missing and layer + 1 < len(names):
                raise WorkloadError(
                    f"the weights in {folder.name} lack {missing[0]!r}"
                    + (f" and {len(missing) - 1} more of that layer" if len(missing) > 1 else ""),
                    hint="they must be of this very model: compare them with config.json, or move them away "
                    "to start from random weights",
                )
        self._check_shapes(shapes)

    def layer(self, index: int) -> dict[str, Tensor]:
        """One layer's values by own name, on the CPU, in the dtype they are stored in.

        Raises:
            WorkloadError: a file can't be read.
        """
        wanted = self._wanted[index]
        by_file: dict[Path, list[str]] = {}
        for name in wanted.values():
            by_file.setdefault(self._files[name], []).append(name)
        read: dict[str, Tensor] = {}
        for path, names in by_file.items():
            read |= _load_tensors(path, names)
        return {own: read[name] for own, name in wanted.items()}

    def _find(self, name: str) -> str | None:
        for spelled in (name, self._ties.get(name)):
            if spelled is None:
                continue
            for now, then in (("", ""), *_OLD_SUFFIXES):
                if not spelled.endswith(now):
                    continue
                older = spelled.removesuffix(now) + then
                for tried in (older, older.removeprefix(self._prefix), self._prefix + older):
                    if tried in self._files:
                        return tried
        return None

    def _check_shapes(self, shapes: Sequence[Mapping[str, Sequence[int]]]) -> None:
        headers: dict[Path, Mapping[str, Any]] = {}
        for wanted, right in zip(self._wanted, shapes, strict=True):
            for own, name in wanted.items():
                path = self._files[name]
                if path not in headers:
                    headers[path] = _tensor_shapes(path)
                have = headers[path].get(name)
                if have is None or tuple(have) != tuple(right[own]):
                    raise WorkloadError(
                        f"{path.name}: {name!r} has the shape {list(have) if have else 'of nothing'}, "
                        f"config.json makes it {list(right[own])}",
                        hint="weights and config.json must be of the same model",
                    )


class ShippedWeights:
    """The weights that a node was sent: one safetensors file, keyed ``<layer>.<own name>``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._names = list(safetensors.read_header(path).tensors)

    def layer(self, index: int) -> dict[str, Tensor]:
        """One layer's values by own name, on the CPU; {} for a layer that the file does not hold."""
        start = f"{index}."
        names = [name for name in self._names if name.startswith(start)]
        read = safetensors.load(self.path, names) if names else {}
        return {name.removeprefix(start): tensor for name, tensor in read.items()}


def write_layer_weights(stored: StoredWeights, layers: Sequence[int], path: Path) -> None:
    """Writes the file that ``ShippedWeights`` reads, for those layers; one layer in memory at a time.

    Raises:
        SkyctlError: a weights file can't be read, or the disk is full.
    """
    pieces = []
    try:
        for index in layers:
            piece = path.with_name(f"{path.name}.{index}")
            pieces.append(piece)
            safetensors.save(piece, {f"{index}.{own}": t for own, t in stored.layer(index).items()})
        safetensors.merge(pieces, path)
    finally:
        for piece in pieces:
            piece.unlink(missing_ok=True)


def _tensor_names(path: Path) -> list[str]:
    return list(_tensor_shapes(path))


def _tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    if path.suffix == ".bin":
        return {name: tuple(t.shape) for name, t in _load_pickled(path).items()}
    try:
        return {name: entry.shape for name, entry in safetensors.read_header(path).tensors.items()}
    except RecordError as exc:
        raise WorkloadError(exc.message, hint=exc.hint) from exc


def _load_tensors(path: Path, names: Sequence[str]) -> dict[str, Tensor]:
    if path.suffix == ".bin":
        held = _load_pickled(path)
        return {name: held[name].clone() for name in names}
    try:
        return safetensors.load(path, names)
    except RecordError as exc:
        raise WorkloadError(exc.message, hint=exc.hint) from exc


def _load_pickled(path: Path) -> dict[str, Tensor]:
    """The tensors of a .bin file, memory-mapped; nothing but tensors is unpickled."""
    try:
        held = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as exc:
        raise WorkloadError(f"{path} can't be read as weights: {type(exc).__name__}: {exc}") from exc
    if not isinstance(held, dict):
        raise WorkloadError(f"{path} holds a {type(held).__name__}, not weights by name")
    return {str(name): tensor for name, tensor in held.items() if isinstance(tensor, Tensor)}
