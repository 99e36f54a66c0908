"""The marks of layers that cost the same: their operations, and the numbers they were made with."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from skyctl.workload.deferred_init import DispatchMode
from skyctl.workload.structures import Value, value_tensors


class OperationDigest(DispatchMode):  # type: ignore[no-untyped-call]
    """Hashes every operation: its name, its tensors' shapes and dtypes, its other arguments.

    Args:
        kinds_only: these depend on values; ``kinds`` says which operations there were.
    """

    def __init__(self, *, kinds_only: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.digest = hashlib.sha256()
        self.kinds: set[str] = set()
        self._kinds_only = kinds_only

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self._kinds_only:
            self.kinds.add(str(func))
        elif not str(func).startswith("prim."):
            words = [_describe_argument(a) for a in tree_leaves((tuple(args), dict(kwargs or {})))]
            self.digest.update(f"{func}({';'.join(words)})\n".encode())
        return func(*args, **(kwargs or {}))


def _describe_argument(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype}{list(value.shape)}{list(value.stride())}{value.requires_grad:d}"
    return "generator" if isinstance(value, torch.Generator) else repr(value)


def plain_settings(layer: nn.Module) -> list[str]:
    """The plain values of a layer's modules: they tell it from one of other classes or with other numbers."""
    lines = []
    for name, module in layer.named_modules():
        plain = {k: v for k, v in vars(module).items() if isinstance(v, bool | int | float | str | tuple)}
        lines.append(
            f"{name} {type(module).__qualname__} {sorted(plain.items(), key=lambda item: item[0])!r}"
        )
    return lines


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | str) or (
        isinstance(value, tuple) and all(_is_plain(part) for part in value)
    )


def backward_kinds(out: Value) -> list[str]:
    """The kinds of the autograd nodes behind ``out``, in a fixed order; a user's own Function shows here."""
    seen: set[Any] = set()
    kinds = []
    stack: list[Any] = [t.grad_fn for t in value_tensors(out)]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        kinds.append(str(node.name()))
        stack += [following for following, _ in node.next_functions]
    return kinds
