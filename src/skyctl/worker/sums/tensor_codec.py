"""Codecs for tensors on a link: floats in fewer bits, encoded into the buffer that is sent, decoded from it.

* ``float32``, ``bfloat16``: rounded to nearest. bfloat16 keeps each value to 2^-8 of itself.
* ``int8``: blocks of ``BLOCK`` values in memory order (the last may be shorter), each with a float32
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

_CHUNK_VALUES = 1024 * BLOCK
"""Values converted at a time on a CPU, so that intermediate results stay in its cache."""

_CASTS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LINK_DTYPES = (*_CASTS, "int8")


class TensorCodec(Protocol):
    """How one tensor is sent; ``shape`` and ``dtype`` are those of the buffer on the link."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...

    def encode(self, tensor: Tensor, wire: Tensor) -> None:
        """Fills the buffer ``wire`` from the tensor."""

    def decode(self, wire: Tensor, tensor: Tensor) -> None:
        """Fills the (contiguous) tensor from the buffer ``wire``."""


def codec_for(link_dtype: str | None, shape: Sequence[int], dtype: torch.dtype) -> TensorCodec | None:
    """The codec of a tensor on a link of that dtype; None: it is sent unchanged.

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
    codec = Int8Codec(count) if cast is None else CastCodec(tuple(shape), cast)
    wire_bytes = math.prod(codec.shape) * codec.dtype.itemsize
    return codec if wire_bytes < count * dtype.itemsize else None


class CastCodec:
    """Rounds every value to a narrower dtype."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype

    def encode(self, tensor: Tensor, wire: Tensor) -> None:
        """Rounds the tensor into the buffer."""
        wire.copy_(tensor)

    def decode(self, wire: Tensor, tensor: Tensor) -> None:
        """Widens the buffer into the tensor."""
        tensor.copy_(wire)


class Int8Codec:
    """Sends a byte in place of each value, and a float32 scale for each block of them.

    Args:
        count: how many values the tensor has.
        cpu_part: how many are converted at a time on a CPU; whole blocks.
    """

    dtype = torch.uint8

    def __init__(self, count: int, cpu_part: int = _CHUNK_VALUES) -> None:
        self.count, self._cpu_part = count, cpu_part
        self.blocks = -(-count // BLOCK)
        self.shape = (4 * self.blocks + count,)
        self._scratch: Tensor | None = None

    def encode(self, tensor: Tensor, wire: Tensor) -> None:
        """Scales and rounds the tensor into the buffer; one that is not contiguous is copied first."""
        scales, values = self._parts(wire)
        chunk = min(self._cpu_part if tensor.device.type == "cpu" else self.count, self.count)
        if self._scratch is None:
            self._scratch = torch.empty(max(chunk, BLOCK), dtype=torch.float32, device=tensor.device)
        flat = tensor.detach().reshape(-1)
        for first in range(0, self.count, chunk):
            self._encode(flat, scales, values, first, min(first + chunk, self.count))

    def _encode(self, flat: Tensor, scales: Tensor, values: Tensor, first: int, stop: int) -> None:
        assert self._scratch is not None
        for a, b in _block_ranges(first, stop):
            rows = (b - a) // BLOCK or 1
            values_in, scratch = flat[a:b].view(rows, -1), self._scratch[: b - a].view(rows, -1)
            scale = scales[a // BLOCK : a // BLOCK + rows].view(rows, 1)
            if values_in.dtype == scratch.dtype:
                torch.abs(values_in, out=scratch)
            else:
                scratch.copy_(values_in).abs_()
            torch.amax(scratch, 1, keepdim=True, out=scale)
            scale.div_(127).clamp_(min=SMALLEST_SCALE)
            torch.mul(values_in, scale.reciprocal(), out=scratch)
            values[a:b].view(rows, -1).copy_(scratch.round_())

    def decode(self, wire: Tensor, tensor: Tensor) -> None:
        """Multiplies the buffer's bytes by their scales into the tensor."""
        scales, values = self._parts(wire)
        flat = tensor.view(-1)
        chunk = self._cpu_part if tensor.device.type == "cpu" else self.count
        for first in range(0, self.count, chunk):
            for a, b in _block_ranges(first, min(first + chunk, self.count)):
                rows = (b - a) // BLOCK or 1
                scale = scales[a // BLOCK : a // BLOCK + rows].view(rows, 1)
                out, whole = flat[a:b].view(rows, -1), values[a:b].view(rows, -1)
                if out.dtype == torch.float32:
                    out.copy_(whole).mul_(scale)
                else:
                    torch.mul(whole, scale, out=out)

    def _parts(self, wire: Tensor) -> tuple[Tensor, Tensor]:
        """The (scales, values) that a buffer holds."""
        head = 4 * self.blocks
        return wire[:head].view(torch.float32), wire[head:].view(torch.int8)


def _block_ranges(first: int, stop: int) -> list[tuple[int, int]]:
    """[first, stop) as its whole blocks, and the shorter block at its end."""
    middle = stop - (stop - first) % BLOCK
    return [(a, b) for a, b in ((first, middle), (middle, stop)) if a < b]
