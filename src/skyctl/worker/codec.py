"""What a float tensor is sent as: fewer bits, straight into the buffer that is sent, and straight out of it.

* ``float32``, ``bfloat16``: rounded to nearest. bfloat16 keeps each value to 2^-8 of itself.
* ``int8``: blocks of ``BLOCK`` values as they lie in memory (the last may be shorter), each with a float32
  scale, its largest magnitude / 127; so each value is kept to 1/254 of the largest of its block (and to
  ``SMALLEST_SCALE`` / 2). On the link: the scales, then the values, in one buffer of bytes.

A NaN arrives as NaN, and nothing infinite arrives as a number: int8 loses the whole block that holds one.
Only what gets smaller is encoded; other tensors (integers, narrower floats, empty ones) go as they are.
Rounding is plain: neither stochastic rounding nor error feedback brought losses nearer (docs/decisions.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch

from skyctl.errors import RunError

Tensor = torch.Tensor

BLOCK = 128
"""Values to a scale of int8."""

SMALLEST_SCALE = torch.finfo(torch.float32).tiny

_CHUNK = 1024 * BLOCK
"""Values converted at a time on a CPU: what is between the passes stays in its cache."""

_CASTS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LINK_DTYPES = (*_CASTS, "int8")


class Code(Protocol):
    """How one tensor is sent. ``shape`` and ``dtype``: of the buffer that goes over the link."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...

    def encode(self, tensor: Tensor, wire: Tensor) -> None:
        """Fills the buffer."""

    def decode(self, wire: Tensor, tensor: Tensor) -> None:
        """Fills the (contiguous) tensor."""


def code_for(link_dtype: str | None, shape: Sequence[int], dtype: torch.dtype) -> Code | None:
    """How a tensor is sent over a link of that dtype (None: as it is).

    Raises:
        RunError: no such link dtype.
    """
    if link_dtype is None:
        return None
    if link_dtype not in LINK_DTYPES:
        raise RunError(f"unknown link dtype {link_dtype!r}; there is {', '.join(LINK_DTYPES)}")
    count = math.prod(shape)
    if not count or not dtype.is_floating_point:
        return None
    cast = _CASTS.get(link_dtype)
    code = Int8(count) if cast is None else Cast(tuple(shape), cast)
    wire_bytes = math.prod(code.shape) * code.dtype.itemsize
    return code if wire_bytes < count * dtype.itemsize else None


class Cast:
    """Every value rounded to a narrower type."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype

    def encode(self, tensor: Tensor, wire: Tensor) -> None:
        """Fills the buffer."""
        wire.copy_(tensor)

    def decode(self, wire: Tensor, tensor: Tensor) -> None:
        """Fills the tensor."""
        tensor.copy_(wire)


class Int8:
    """Bytes in place of values, with a scale a block.

    Args:
        count: how many values.
    """

    dtype = torch.uint8

    def __init__(self, count: int) -> None:
        self.count = count
        self.blocks = -(-count // BLOCK)
        self.shape = (4 * self.blocks + count,)
        self._scratch: Tensor | None = None

    def encode(self, tensor: Tensor, wire: Tensor) -> None:
        """Fills the buffer; a tensor that is not contiguous is copied once."""
        scales, values = self._parts(wire)
        chunk = min(_CHUNK if tensor.device.type == "cpu" else self.count, self.count)
        if self._scratch is None:
            self._scratch = torch.empty(max(chunk, BLOCK), dtype=torch.float32, device=tensor.device)
        flat = tensor.detach().reshape(-1)
        for first in range(0, self.count, chunk):
            self._encode(flat, scales, values, first, min(first + chunk, self.count))

    def _encode(self, flat: Tensor, scales: Tensor, values: Tensor, first: int, stop: int) -> None:
        assert self._scratch is not None
        for a, b in _whole_blocks(first, stop):
            rows = (b - a) // BLOCK or 1
            given, room = flat[a:b].view(rows, -1), self._scratch[: b - a].view(rows, -1)
            scale = scales[a // BLOCK : a // BLOCK + rows].view(rows, 1)
            torch.abs(given, out=room) if given.dtype == room.dtype else room.copy_(given).abs_()
            torch.amax(room, 1, keepdim=True, out=scale)
            scale.div_(127).clamp_(min=SMALLEST_SCALE)
            torch.mul(given, scale.reciprocal(), out=room)
            values[a:b].view(rows, -1).copy_(room.round_())

    def decode(self, wire: Tensor, tensor: Tensor) -> None:
        """Fills the tensor."""
        scales, values = self._parts(wire)
        flat = tensor.view(-1)
        chunk = _CHUNK if tensor.device.type == "cpu" else self.count
        for first in range(0, self.count, chunk):
            for a, b in _whole_blocks(first, min(first + chunk, self.count)):
                rows = (b - a) // BLOCK or 1
                scale = scales[a // BLOCK : a // BLOCK + rows].view(rows, 1)
                out, whole = flat[a:b].view(rows, -1), values[a:b].view(rows, -1)
                if out.dtype == torch.float32:
                    out.copy_(whole).mul_(scale)
                else:
                    torch.mul(whole, scale, out=out)

    def _parts(self, wire: Tensor) -> tuple[Tensor, Tensor]:
        """(scales, values) of a buffer."""
        head = 4 * self.blocks
        return wire[:head].view(torch.float32), wire[head:].view(torch.int8)


def _whole_blocks(first: int, stop: int) -> list[tuple[int, int]]:
    """The range cut into whole blocks, and what is left of the last one."""
    middle = stop - (stop - first) % BLOCK
    return [(a, b) for a, b in ((first, middle), (middle, stop)) if a < b]
