"""Tensors that the ``transformers`` library holds in one piece and files hold in several, as experts are.

The library knows how files name its tensors, and how they are put together. This asks it for one tensor at a
time, so that no more than one is in memory.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from skyctl.errors import WorkloadError


class WeightConversion:
    """How files hold a model's tensors: under the library's names, or as pieces under names of their own.

    Args:
        model: the library's; its tensors need no values.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        mapping: Any = importlib.import_module("transformers.conversion_mapping")
        self._loading: Any = importlib.import_module("transformers.core_model_loading")
        steps = mapping.get_model_conversion_mapping(model, add_legacy=False)
        self._renamings = [step for step in steps if isinstance(step, self._loading.WeightRenaming)]
        self._converters = [step for step in steps if isinstance(step, self._loading.WeightConverter)]

    def pieces(self, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, tuple[int, ...]]]:
        """By the library's name of each tensor in several pieces, their shapes by name.

        Args:
            tensors: the model's, by the library's names; they need no values.
        """
        if not self._renamings and not self._converters:
            return {}
        cut = {}
        for name, tensor in tensors.items():
            pieces = self.split(name, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
            if list(pieces) != [name]:
                cut[name] = {piece: tuple(part.shape) for piece, part in pieces.items()}
        return cut

    def split(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """By name in files, the pieces of the library's tensor, as ``save_pretrained`` writes them."""
        pieces: dict[str, Tensor] = self._loading.revert_weight_conversion(self._model, {name: tensor})
        return pieces

    def merge(self, name: str, pieces: Mapping[str, Tensor]) -> Tensor:
        """The tensor that those pieces make, as ``from_pretrained`` reads them.

        Raises:
            WorkloadError: they make another one.
        """
        step: Any = None
        for piece, tensor in sorted(pieces.items(), key=lambda item: self._loading.dot_natural_key(item[0])):
            whole, pattern = self._loading.rename_source_key(piece, self._renamings, self._converters)
            if step is None:
                fitting = [c for c in self._converters if pattern in c.source_patterns]
                step = deepcopy(fitting[0]) if fitting else self._loading.WeightRenaming(piece, whole)
            step.add_tensor(whole, piece, pattern or piece, tensor)
        tensors = step.convert(name, model=self._model, config=self._model.config) if step is not None else {}
        if name not in tensors:
            raise WorkloadError(f"the weights hold no pieces that make {name!r}")
        value: Any = tensors[name]
        merged: Tensor = value[0] if isinstance(value, list) else value
        return merged
