"""State of optimizers and modules as JSON values and tensors, without pickle: how a shard holds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

TensorPlacement = Callable[[Tensor], Tensor]
"""A tensor as it was read → the same values on the device and with the strides where they belong."""


def encode_value(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """A value as JSON values; its tensors are added to ``tensors``, and referred to by name.

    Raises:
        TypeError: it holds something else than tensors, numbers, texts, and lists, tuples and dicts of them.
    """
    if isinstance(value, Tensor):
        while name in tensors:
            name += "'"
        tensors[name] = value.detach()
        return {"tensor": name}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (list, tuple):
        parts = [encode_value(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]
        return {type(value).__name__: parts}
    if type(value) is dict:
        pairs = [[_check_plain_key(k), encode_value(v, f"{name}.{k}", tensors)] for k, v in value.items()]
        return {"dict": pairs}
    raise TypeError(f"it holds a {type(value).__name__}, not tensors and plain values alone")


def _check_plain_key(key: Any) -> Any:
    if key is None or type(key) in (bool, int, float, str):
        return key
    raise TypeError(f"it holds a dict with the key {key!r:.80}")


def decode_value(value: Any, tensors: Mapping[str, Tensor], place: TensorPlacement) -> Any:
    """The value that ``encode_value`` encoded.

    Args:
        tensors: by name, as they were read.
        place: puts each of them where it belongs.
    """
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return place(tensors[value["tensor"]])
    if "list" in value:
        return [decode_value(item, tensors, place) for item in value["list"]]
    if "tuple" in value:
        return tuple(decode_value(item, tensors, place) for item in value["tuple"])
    return {key: decode_value(item, tensors, place) for key, item in value["dict"]}


def keep_placement(tensor: Tensor) -> Tensor:
    """The tensor as it was read, on the CPU."""
    return tensor


def placement_for(key: str, parameter: Tensor, group: Mapping[str, Any]) -> TensorPlacement:
    """Places state as torch's own optimizers do: on the parameter's device, with its strides.

    A step count stays in host memory, unless the optimizer's kernels read it (capturable or fused).
    """

    def place(tensor: Tensor) -> Tensor:
        if tensor.shape == parameter.shape and tensor.dim():
            return torch.empty_like(parameter, dtype=tensor.dtype, requires_grad=False).copy_(tensor)
        if key == "step" and not (group.get("capturable") or group.get("fused")):
            return tensor.clone()
        return tensor.to(parameter.device, copy=True)

    return place
