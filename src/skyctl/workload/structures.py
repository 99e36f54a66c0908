"""Stand-in until the structures of batches are merged."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def flatten_value(value: Any) -> tuple[tuple[Tensor, ...], Any]:
    """The tensors of a value."""
    if isinstance(value, Tensor):
        return (value,), None
    if isinstance(value, tuple | list):
        found = [flatten_value(v) for v in value]
        return tuple(t for ts, _ in found for t in ts), {"tuple": [s for _, s in found]}
    found_by_key = {k: flatten_value(v) for k, v in value.items()}
    return tuple(t for ts, _ in found_by_key.values() for t in ts), {
        "dict": {k: s for k, (_, s) in found_by_key.items()}
    }
