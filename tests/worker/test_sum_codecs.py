"""How chunks of sums are encoded: what arrives, what is added to what, and what is no number."""

from __future__ import annotations

import pytest
import torch

from skyctl.worker.sums.sum_codecs import SumCodec, chunk_numel, make_sum_codec
from skyctl.worker.sums.tensor_codec import BLOCK

SIZES = (1, BLOCK - 1, BLOCK, 3 * BLOCK + 5, 40_000)


def encoded(codec: SumCodec, values: torch.Tensor) -> torch.Tensor:
    payload = torch.zeros(codec.nbytes(values.numel()), dtype=torch.uint8)
    total = codec.total(payload, values.numel())
    total.copy_(values)
    codec.encode(total, payload)
    return payload


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize(("name", "bound"), [("float32", 0.0), ("bfloat16", 2.0**-8), ("int8", 1 / 254)])
def test_a_hop_is_off_by_no_more_than_its_format(name: str, bound: float, numel: int) -> None:
    """bfloat16 relative to each value, int8 to the largest of a block, here of all."""
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    codec = make_sum_codec(name)
    payload = encoded(codec, values)
    assert codec.fault(payload, numel) is None
    off = (codec.decode(payload, numel).double() - values.double()).abs()
    scale = values.abs().max() if name == "int8" else values.abs()
    assert bool((off <= bound * scale * 1.001).all())
    total = torch.ones(numel)
    codec.add(total, payload)
    assert torch.equal(total, 1.0 + codec.decode(payload, numel).float())
    assert torch.equal(encoded(make_sum_codec(name), codec.decode(payload, numel).float()), payload)


def test_int8_takes_33_bytes_for_128_of_float32() -> None:
    assert make_sum_codec("int8").nbytes(128 * 1000) == 132 * 1000
    for name in ("float32", "bfloat16", "int8", "fixed32"):
        for size in (1, 64, 262_144):
            numel = chunk_numel(name, size)
            assert numel >= 1
            assert make_sum_codec(name).nbytes(numel) <= max(size, 4, 132 if name == "int8" else 0)
    assert chunk_numel("int8", 262_144) % BLOCK == 0


@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
def test_a_block_with_what_is_no_number_arrives_as_nan_and_is_no_lie(odd: float) -> None:
    values = torch.ones(3 * BLOCK)
    values[BLOCK + 3] = odd
    codec = make_sum_codec("int8")
    payload = encoded(codec, values)
    assert codec.fault(payload, 3 * BLOCK) is None
    decoded = codec.decode(payload, 3 * BLOCK)
    assert bool(decoded[BLOCK : 2 * BLOCK].isnan().all())
    assert torch.equal(decoded[:BLOCK], values[:BLOCK])
    assert torch.equal(decoded[2 * BLOCK :], values[:BLOCK])


def test_integers_are_added_in_the_message_and_wrap_around() -> None:
    codec = make_sum_codec("fixed32")
    payload = encoded(codec, torch.tensor([2**31 - 1, -5], dtype=torch.int32))
    total = torch.tensor([1, 7], dtype=torch.int32)
    codec.add(total, payload)
    assert total.tolist() == [-(2**31), 2]
