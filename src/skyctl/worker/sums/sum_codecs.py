"""How the numbers of a sum travel: a codec for each format, which adds what arrives and encodes what leaves.

* ``float32``, ``fixed32``: as they are, added in the message itself. The numbers of ``fixed32`` are int32
  (``fixed_point``), whose addition has no order.
* ``bfloat16``: rounded on each hop, added in float32.
* ``int8``: blocks of ``BLOCK`` numbers (the last may be shorter), each with a float32 scale, as on links
  (``tensor_codec``): the scales, then a byte for each number. Each hop encodes its partial sum anew, so each
  adds up to 1/254 of a block's largest magnitude to the error. A block that holds something not finite has
  the scale 0, and arrives as NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

import torch

from skyctl.worker.sums.sum_layout import SERIAL_NUMEL
from skyctl.worker.sums.tensor_codec import BLOCK, Int8Codec

Tensor = torch.Tensor

FIXED32 = "fixed32"
_SCALE_BYTES = 4
_SERIAL_BLOCKS_NUMEL = SERIAL_NUMEL // BLOCK * BLOCK


class SumCodec(Protocol):
    """One format, for one thread: it may keep memory between calls.

    ``payload`` is a message's, flat bytes in host memory. If ``total`` and ``decode`` give a view of it or
    memory of the codec, that holds until the next call.
    """

    def nbytes(self, numel: int) -> int:
        """Bytes of so many numbers."""

    def total(self, payload: Tensor, numel: int) -> Tensor:
        """The tensor for a chunk's own numbers that the payload will be encoded from: flat, to be filled."""

    def add(self, total: Tensor, payload: Tensor) -> None:
        """Adds what a payload holds to ``total``."""

    def encode(self, total: Tensor, payload: Tensor) -> None:
        """Fills the payload that ``total`` was made for."""

    def decode(self, payload: Tensor, numel: int) -> Tensor:
        """The numbers that a payload holds, flat; of a dtype that may be narrower than the sum's."""

    def fault(self, payload: Tensor, numel: int) -> str | None:
        """The fault of a received payload that no honest peer sends; None: there is none."""

    def is_finite(self, payload: Tensor, numel: int) -> bool:
        """Whether all numbers that a received payload holds are finite, and so is their sum."""


class PlainCodec:
    """Sends numbers as they are: what is added is the message."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def nbytes(self, numel: int) -> int:
        return numel * self._dtype.itemsize

    def total(self, payload: Tensor, numel: int) -> Tensor:  # noqa: ARG002
        return payload.view(self._dtype)

    def add(self, total: Tensor, payload: Tensor) -> None:
        for own, theirs in _parts(total, payload.view(self._dtype)):
            own.add_(theirs)

    def encode(self, total: Tensor, payload: Tensor) -> None:
        """Nothing: it is there already."""

    def decode(self, payload: Tensor, numel: int) -> Tensor:  # noqa: ARG002
        return payload.view(self._dtype)

    def fault(self, payload: Tensor, numel: int) -> str | None:  # noqa: ARG002
        return None

    def is_finite(self, payload: Tensor, numel: int) -> bool:  # noqa: ARG002
        return not self._dtype.is_floating_point or is_finite(payload.view(self._dtype))


class RoundedCodec(PlainCodec):
    """Sends numbers in a narrower float, and adds them in float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self._scratch = torch.empty(0, dtype=torch.float32)

    def total(self, payload: Tensor, numel: int) -> Tensor:  # noqa: ARG002
        if self._scratch.numel() < numel:
            self._scratch = torch.empty(numel, dtype=torch.float32)
        return self._scratch[:numel]

    def encode(self, total: Tensor, payload: Tensor) -> None:
        """Rounds each number."""
        for narrow, exact in _parts(payload.view(self._dtype), total):
            narrow.copy_(exact)


class BlockCodec:
    """Sends a byte for each number and a scale for each block of them, and adds in float32."""

    def __init__(self) -> None:
        self._codec = Int8Codec(0)
        self._total, self._decoded = torch.empty(0, dtype=torch.float32), torch.empty(0, dtype=torch.float32)

    def nbytes(self, numel: int) -> int:
        return _SCALE_BYTES * -(-numel // BLOCK) + numel

    def total(self, payload: Tensor, numel: int) -> Tensor:  # noqa: ARG002
        if self._total.numel() < numel:
            self._total = torch.empty(numel, dtype=torch.float32)
        return self._total[:numel]

    def add(self, total: Tensor, payload: Tensor) -> None:
        for own, theirs in _parts(total, self.decode(payload, total.numel())):
            own.add_(theirs)

    def encode(self, total: Tensor, payload: Tensor) -> None:
        self._for(total.numel()).encode(total, payload)
        scales = _scales(payload, total.numel())
        scales.masked_fill_(scales.isfinite().logical_not_(), 0.0)

    def decode(self, payload: Tensor, numel: int) -> Tensor:
        if self._decoded.numel() < numel:
            self._decoded = torch.empty(numel, dtype=torch.float32)
        decoded = self._decoded[:numel]
        self._for(numel).decode(payload, decoded)
        for block in (_scales(payload, numel) == 0.0).nonzero().view(-1).tolist():
            decoded[block * BLOCK : (block + 1) * BLOCK] = torch.nan
        return decoded

    def fault(self, payload: Tensor, numel: int) -> str | None:
        scales = _scales(payload, numel)
        bad = (scales.isfinite() & (scales >= 0.0)).logical_not_()
        return f"a scale of {scales[bad][0].item():g}" if bool(bad.any()) else None

    def is_finite(self, payload: Tensor, numel: int) -> bool:
        return bool((_scales(payload, numel) != 0.0).all())

    def _for(self, numel: int) -> Int8Codec:
        if self._codec.count != numel:
            self._codec = Int8Codec(numel, _SERIAL_BLOCKS_NUMEL)
        return self._codec


def make_sum_codec(name: str) -> SumCodec:
    """The codec of a plan's ``sync.format``, for one thread."""
    if name == "int8":
        return BlockCodec()
    if name == "bfloat16":
        return RoundedCodec(torch.bfloat16)
    return PlainCodec({"float32": torch.float32, FIXED32: torch.int32}[name])


def chunk_numel(name: str, chunk_bytes: int) -> int:
    """How many numbers go into a message whose payload may have so many bytes; of int8 whole blocks."""
    if name != "int8":
        return max(1, chunk_bytes // make_sum_codec(name).nbytes(1))
    return max(1, chunk_bytes // (BLOCK + _SCALE_BYTES)) * BLOCK


def _scales(payload: Tensor, numel: int) -> Tensor:
    return payload[: _SCALE_BYTES * -(-numel // BLOCK)].view(torch.float32)


def is_finite(numbers: Tensor) -> bool:
    """Whether numbers and their sum are; a quarter of the time that ``isfinite`` of each would take."""
    sums = [part.sum(dtype=torch.float32) for part in torch.split(numbers, SERIAL_NUMEL)]
    return all(math.isfinite(total.item()) for total in sums)


def _parts(one: Tensor, other: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The same parts of two flat tensors, of ``SERIAL_NUMEL`` elements at most."""
    return zip(torch.split(one, SERIAL_NUMEL), torch.split(other, SERIAL_NUMEL), strict=True)
