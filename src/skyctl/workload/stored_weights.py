"""Weights in files that a model starts from: matched by name and shape, read one tensor at a time.

The files are those of an ``hf:`` folder, as ``save_pretrained`` writes them (``model.safetensors`` or
``pytorch_model.bin``, or several of either with an ``….index.json``; names may lack the base model's prefix,
or be of BERT's first years), or whatever ``--init-from`` names: a run's ``weights.safetensors``, a state dict
saved by torch, or such a folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from skyctl.errors import WorkloadError
from skyctl.workload.shared_parameters import SharedParameter
from skyctl.workload.weight_files import (
    PICKLED,
    ReadTensors,
    TensorKind,
    kinds_of,
    load_tensors,
    shown_names,
    tensor_kinds,
    weight_files,
)

_OLD_SUFFIXES = ((".LayerNorm.weight", ".LayerNorm.gamma"), (".LayerNorm.bias", ".LayerNorm.beta"))
_WRAPPERS = ("module.", "_orig_mod.")
"""Prefixes that DistributedDataParallel and ``torch.compile`` put before the names of a model they wrap."""


MergePieces = Callable[[str, Mapping[str, Tensor]], Tensor]
"""A tensor's name, and the values of its pieces by name → its values."""


LayerValues = Callable[[int], Mapping[str, Tensor]]
"""A layer's index → its stored values by own name."""


@dataclass(frozen=True)
class WeightNaming:
    """The names of a model's tensors in files.

    Attributes:
        names: per layer, own name → name in files.
        prefix: of the base model, which names in files may lack, or have where the model has not.
        ties: name → the name whose values it starts from where the files lack it.
        pieces: name → the tensors that files may hold in its place, shapes by name; ``merge`` joins them.
    """

    names: Sequence[Mapping[str, str]]
    prefix: str = ""
    ties: Mapping[str, str] = field(default_factory=dict)
    pieces: Mapping[str, Mapping[str, Sequence[int]]] = field(default_factory=dict)
    merge: MergePieces | None = None

    def find(self, name: str, files: Mapping[str, Path]) -> str | None:
        """How the files spell a tensor's name; None where they have no such tensor."""
        for spelled in (name, self.ties.get(name)):
            if spelled is None:
                continue
            for now, then in (("", ""), *_OLD_SUFFIXES):
                if not spelled.endswith(now):
                    continue
                older = spelled.removesuffix(now) + then
                for tried in (older, older.removeprefix(self.prefix), self.prefix + older):
                    if tried in files:
                        return tried
        pieces = self.pieces.get(name)
        return name if pieces and pieces.keys() <= files.keys() else None

    def held_as(self, name: str, files: Mapping[str, Path]) -> list[str]:
        """The tensors of the files that make ``name``, which ``find`` has found: itself, or its pieces."""
        return [name] if name in files else list(self.pieces[name])


class StoredWeights:
    """The values of a model's layers in files, read by tensor.

    Args:
        files: by the tensor's name, the file that holds it.
        wanted: per layer, own name → name in the files, as ``naming`` has found it there.

    Attributes:
        fresh: names in the library's model that no file holds; their values start at random.
    """

    def __init__(
        self,
        files: Mapping[str, Path],
        wanted: Sequence[Mapping[str, str]],
        naming: WeightNaming,
        fresh: Sequence[str] = (),
    ) -> None:
        self._files, self._wanted, self._naming, self.fresh = files, wanted, naming, list(fresh)
        self._under: StoredWeights | None = None

    def layer(self, index: int) -> Mapping[str, Tensor]:
        """One layer's values by own name, on the CPU, in the dtype they are stored in.

        They are read as they are asked for, each time: WorkloadError where a file can't be read.
        """
        sources = self._sources(index)
        return ReadTensors({own: partial(weights._read, name) for own, (weights, name) in sources.items()})

    def places(self, index: int) -> dict[str, tuple[Path, str] | None]:
        """By own name of one layer's tensors, the safetensors file that holds it and its name there.

        None: it has to be read (``layer``), for no such file holds it as it is.
        """
        return {own: weights._place(name) for own, (weights, name) in self._sources(index).items()}

    def _sources(self, index: int) -> dict[str, tuple[StoredWeights, str]]:
        """By own name of one layer's tensors, the weights that have it, and its name there."""
        others = {} if self._under is None else self._under._sources(index)
        return others | {own: (self, name) for own, name in self._wanted[index].items()}

    def _place(self, name: str) -> tuple[Path, str] | None:
        path = self._files.get(name)
        return None if path is None or path.suffix in PICKLED else (path, name)

    def _read(self, name: str) -> Tensor:
        by_file: dict[Path, list[str]] = {}
        for held in self._naming.held_as(name, self._files):
            by_file.setdefault(self._files[held], []).append(held)
        read: dict[str, Tensor] = {}
        for path, names in by_file.items():
            read |= load_tensors(path, names)
        return read[name] if name in read or self._naming.merge is None else self._naming.merge(name, read)

    def over(self, others: StoredWeights) -> StoredWeights:
        """The same, and the values that only ``others`` has."""
        both = StoredWeights(self._files, self._wanted, self._naming, self.fresh)
        both._under = others
        return both

    def sharing(self, shared: Sequence[SharedParameter]) -> StoredWeights:
        """The same with one tensor for all uses of a shared parameter: the first that is in the files."""
        wanted = [dict(names) for names in self._wanted]
        for parameter in shared:
            there = [wanted[layer][own] for layer, own in parameter.uses if own in wanted[layer]]
            for layer, own in parameter.uses if there else ():
                wanted[layer][own] = there[0]
        return StoredWeights(self._files, wanted, self._naming, self.fresh)


def match_hub_weights(
    folder: Path, naming: WeightNaming, shapes: Sequence[Mapping[str, Sequence[int]]]
) -> StoredWeights:
    """The weights in the model's own folder. A new head may be missing; what is left over is ignored.

    Args:
        shapes: per layer, own name → shape.

    Raises:
        WorkloadError: a tensor is missing or of another shape, or a file can't be read.
    """
    files = weight_files(folder) or {}
    wanted: list[dict[str, str]] = []
    fresh: list[str] = []
    for layer, named in enumerate(naming.names):
        stored_names = {own: naming.find(name, files) for own, name in named.items()}
        wanted.append({own: name for own, name in stored_names.items() if name is not None})
        missing = [named[own] for own, name in stored_names.items() if name is None]
        fresh += missing
        if missing and layer + 1 < len(naming.names):
            raise WorkloadError(
                f"the weights in {folder.name} lack {missing[0]!r}"
                + (f" and {len(missing) - 1} more of that layer" if len(missing) > 1 else ""),
                hint="they must be of this very model: compare them with config.json, or move them away "
                "to start from random weights",
            )
    _check_hub_shapes(files, naming, wanted, shapes)
    return StoredWeights(files, wanted, naming, fresh)


def _check_hub_shapes(
    files: Mapping[str, Path],
    naming: WeightNaming,
    wanted: Sequence[Mapping[str, str]],
    shapes: Sequence[Mapping[str, Sequence[int]]],
) -> None:
    kinds = kinds_of(files)
    for names, right in zip(wanted, shapes, strict=True):
        for own, name in names.items():
            for held in naming.held_as(name, files):
                have = kinds.get(held)
                shape = right[own] if held == name else naming.pieces[name][held]
                if have is None or have.shape != tuple(shape):
                    raise WorkloadError(
                        f"{files[held].name}: {held!r} has the shape "
                        f"{list(have.shape) if have else 'of nothing'}, config.json makes it {list(shape)}",
                        hint="weights and config.json must be of the same model",
                    )


def match_weights(
    path: Path, namings: Sequence[WeightNaming], layers: Sequence[Mapping[str, Tensor]], model: str
) -> StoredWeights:
    """The weights of ``--init-from``: just the model's tensors, no fewer and no more, of its shapes.

    Args:
        path: a file, or a folder as ``save_pretrained`` writes it.
        namings: the names that the model's tensors may have there; the one that fits best counts.
        layers: per layer, own name → the model's tensor (one without values will do).
        model: what to call the model.

    Raises:
        WorkloadError: names what is missing, what is left over, and what is of another shape or kind.
    """
    files = weight_files(path) if path.is_dir() else dict.fromkeys(tensor_kinds(path, strict=True), path)
    if not files:
        raise WorkloadError(f"{path} holds no weights")
    kinds = kinds_of(files)
    matches = [(naming, *_matched(naming, files, layers)) for naming in namings]
    naming, wanted, missing = min(matches, key=lambda match: len(match[2]))
    held = {n for names in wanted for name in names.values() for n in naming.held_as(name, files)}
    faults = _Faults(missing=missing, left_over=sorted(set(files) - held))
    for tensors, names in zip(layers, wanted, strict=True):
        for own, name in names.items():
            for piece in naming.held_as(name, files):
                shape = tensors[own].shape if piece == name else naming.pieces[name][piece]
                faults.compare(piece, kinds.get(piece), shape, tensors[own].dtype)
    if faults.words():
        raise WorkloadError(
            f"{path} does not fit {model}: {'; '.join(faults.words())}", hint=faults.hint(path)
        )
    return StoredWeights(files, wanted, naming)


def _matched(
    naming: WeightNaming, files: Mapping[str, Path], layers: Sequence[Mapping[str, Tensor]]
) -> tuple[list[dict[str, str]], list[str]]:
    """Per layer, own name → name in the files; and the names that the files lack.

    Of several names for the same tensor one is enough.
    """
    pairs = list(zip(layers, naming.names, strict=True))
    stored_names = [{own: naming.find(names[own], files) for own in tensors} for tensors, names in pairs]
    wanted = [{own: name for own, name in stored.items() if name} for stored in stored_names]
    there = {id(tensors[own]) for tensors, names in zip(layers, wanted, strict=True) for own in names}
    missing = [
        names[own] for tensors, names in pairs for own, tensor in tensors.items() if id(tensor) not in there
    ]
    return wanted, missing


@dataclass
class _Faults:
    """Why weights do not fit a model, by kind, as data; ``words`` for people."""

    missing: list[str]
    left_over: list[str]
    shapes: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)

    def compare(self, name: str, have: TensorKind | None, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Notes how one tensor of the files differs from the model's, which has that shape and dtype."""
        if have is None:
            self.missing.append(name)  # an index names it, and its file lacks it
        elif have.shape != tuple(shape):
            self.shapes.append(f"{name} is {list(have.shape)}, the model's is {list(shape)}")
        elif _number_kind(have.dtype) != _number_kind(dtype):
            types = [str(kind).removeprefix("torch.") for kind in (have.dtype, dtype)]
            self.kinds.append(f"{name} is {types[0]}, the model's is {types[1]}")

    def words(self) -> list[str]:
        """One phrase a kind of fault; [] where all fits."""
        parts = (
            ("it lacks", self.missing),
            ("it has what the model has not:", self.left_over),
            ("of another shape:", self.shapes),
            ("of another type:", self.kinds),
        )
        return [f"{word} {shown_names(names)}" for word, names in parts if names]

    def hint(self, path: Path) -> str:
        """The advice on these faults."""
        for wrapper in _WRAPPERS:
            stripped = {name.removeprefix(wrapper) for name in self.left_over if name.startswith(wrapper)}
            if stripped and stripped >= set(self.missing):
                return f"its names begin with {wrapper!r}: save the state dict of the model that was wrapped"
        if path.suffix in PICKLED or self.missing or self.left_over:
            return (
                "names and shapes must be those of a run's weights.safetensors of this model: one that a run "
                "has ended with, or the model's own state_dict()"
            )
        return "the weights must be of this very model: give the sizes that it was trained with"


def _number_kind(dtype: torch.dtype) -> str:
    """The kind of a dtype's values: those of the same kind can be converted into each other."""
    if dtype.is_complex:
        return "complex"
    if dtype.is_floating_point:
        return "float"
    return "bool" if dtype == torch.bool else "integer"
