"""Files of weights: which there are, and their tensors' names, shapes and values.

They are those of an ``hf:`` folder, as ``save_pretrained`` writes them (``model.safetensors`` or
``pytorch_model.bin``, or several of either with an ``….index.json``), or a state dict saved by torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from skyctl.agent.node_cache import file_digest
from skyctl.checkpoint.node import safetensors
from skyctl.errors import RecordError, WorkloadError

WEIGHT_FILE_NAMES = ("model.safetensors", "pytorch_model.bin")
PICKLED = (".bin", ".pt", ".pth")
"""How the names of files end that ``torch.save`` has written."""
SHOWN_NAMES = 5
"""Of the tensors that do not fit so many of each kind are named."""


def weight_files(folder: Path) -> dict[str, Path] | None:
    """By the tensor's name, the file that holds it; None where the folder has no weights.

    Raises:
        WorkloadError: an index or a file can't be read.
    """
    for single in WEIGHT_FILE_NAMES:
        index = folder / f"{single}.index.json"
        if (folder / single).is_file():
            return dict.fromkeys(tensor_kinds(folder / single), folder / single)
        if index.is_file():
            try:
                named = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                return {str(name): folder / str(file) for name, file in named.items()}
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
                raise WorkloadError(f"{index} is no index of weights: {exc}") from exc
    return None


def weight_names(path: Path) -> set[str]:
    """The names of all tensors in a file, or in the weight files of a folder.

    Raises:
        WorkloadError: a file can't be read.
    """
    return set(weight_files(path) or {}) if path.is_dir() else set(tensor_kinds(path, strict=True))


def weights_digest(path: Path) -> str:
    """The SHA-256 of a file of weights; of a folder that of its weight files' digests and names.

    Raises:
        WorkloadError: a file can't be read, or the folder has no weights.
    """
    try:
        if not path.is_dir():
            return file_digest(path)
        files = sorted(set((weight_files(path) or {}).values()))
        lines = [f"{file_digest(file)} {file.name}\n" for file in files]
    except OSError as exc:
        raise WorkloadError(f"the weights {path} can't be read: {exc.strerror or exc}") from exc
    if not lines:
        raise WorkloadError(f"{path} holds neither {' nor '.join(WEIGHT_FILE_NAMES)}")
    return hashlib.sha256("".join(lines).encode()).hexdigest()


@dataclass(frozen=True)
class TensorKind:
    shape: tuple[int, ...]
    dtype: torch.dtype


def kinds_of(files: Mapping[str, Path]) -> dict[str, TensorKind]:
    """By name, shape and dtype of every tensor in those files."""
    by_name: dict[str, TensorKind] = {}
    for path in sorted(set(files.values())):
        kinds = tensor_kinds(path)
        by_name |= {name: kind for name, kind in kinds.items() if files.get(name) == path}
    return by_name


def tensor_kinds(path: Path, *, strict: bool = False) -> dict[str, TensorKind]:
    if path.suffix in PICKLED:
        held = _load_pickled(path, strict=strict)
        return {name: TensorKind(tuple(t.shape), t.dtype) for name, t in held.items()}
    try:
        header = safetensors.read_header(path)
    except RecordError as exc:
        raise WorkloadError(exc.message, hint=exc.hint) from exc
    return {
        name: TensorKind(entry.shape, safetensors.DTYPES[entry.dtype])
        for name, entry in header.tensors.items()
    }


def load_tensors(path: Path, names: Iterable[str]) -> dict[str, Tensor]:
    names = list(dict.fromkeys(names))
    if path.suffix in PICKLED:
        held = _load_pickled(path)
        return {name: held[name].detach().clone() for name in names}
    try:
        return safetensors.load(path, names)
    except RecordError as exc:
        raise WorkloadError(exc.message, hint=exc.hint) from exc


def _load_pickled(path: Path, *, strict: bool = False) -> dict[str, Tensor]:
    """The tensors of a file that torch has saved, memory-mapped; nothing but plain values is unpickled.

    Args:
        strict: refuse a file that holds anything beside tensors by name.
    """
    try:
        held: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as exc:
        raise WorkloadError(f"{path} can't be read as weights: {type(exc).__name__}: {exc}") from exc
    if not isinstance(held, dict):
        raise WorkloadError(f"{path} holds a {type(held).__name__}, not weights by name")
    others = {
        str(name): type(value).__name__ for name, value in held.items() if not isinstance(value, Tensor)
    }
    if strict and others:
        inner = next((name for name, kind in others.items() if kind in ("dict", "OrderedDict")), None)
        named = shown_names([f"{name} ({kind})" for name, kind in others.items()])
        raise WorkloadError(
            f"{path} is no plain state dict: it holds {named}",
            hint="save the state dict alone: torch.save("
            + (f"checkpoint[{inner!r}]" if inner is not None else "model.state_dict()")
            + ", 'weights.pt')",
        )
    return {str(name): tensor for name, tensor in held.items() if isinstance(tensor, Tensor)}


class ReadTensors(Mapping[str, Tensor]):
    """Tensors by name that are read when they are asked for: whoever takes one holds that one alone."""

    def __init__(self, readers: Mapping[str, Callable[[], Tensor]]) -> None:
        self._readers = readers

    def __getitem__(self, name: str) -> Tensor:
        return self._readers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)


def shown_names(names: Sequence[str]) -> str:
    more = len(names) - SHOWN_NAMES
    return ", ".join(names[:SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")
