"""The formats in which tensors are sent: stated errors kept, nothing that is not a number becomes one."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyctl.errors import RunError
from skyctl.planner.explanation import what_if
from skyctl.planning import link_dtypes
from skyctl.worker.sums import tensor_codec
from skyctl.worker.sums.tensor_codec import (
    BLOCK,
    LINK_DTYPES,
    SMALLEST_SCALE,
    Int8Codec,
    TensorCodec,
    codec_for,
)

SIZES = st.one_of(st.integers(2, 4 * BLOCK), st.just(1024 * BLOCK + 5))
LARGEST = torch.finfo(torch.float32).max


def through(tensor: torch.Tensor, code: TensorCodec | None) -> torch.Tensor:
    assert code is not None
    wire = torch.full(code.shape, 7, dtype=code.dtype)  # what an earlier message left must not matter
    code.encode(tensor, wire)
    out = torch.empty(tensor.shape, dtype=tensor.dtype)
    code.decode(wire, out)
    return out


def sample(size: int, seed: int, magnitude: float, spread: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(size, generator=generator, dtype=torch.float64)
    values *= torch.exp(spread * torch.randn(size, generator=generator, dtype=torch.float64))
    return (values * magnitude).clamp(-0.99 * LARGEST, 0.99 * LARGEST).float()


def largest_of_blocks(values: torch.Tensor) -> torch.Tensor:
    """Each value's block's largest magnitude."""
    padded = torch.zeros(math.ceil(values.numel() / BLOCK) * BLOCK, dtype=torch.float64)
    padded[: values.numel()] = values.abs()
    return padded.view(-1, BLOCK).amax(1).repeat_interleave(BLOCK)[: values.numel()]


@settings(max_examples=60)
@given(SIZES, st.integers(0, 2**31), st.integers(-45, 38), st.sampled_from([0.0, 1.0, 5.0]))
def test_errors_stay_within_what_is_stated(size: int, seed: int, exponent: int, spread: float) -> None:
    values = sample(size, seed, 10.0**exponent, spread)
    exact = values.double()
    off = (through(values, codec_for("bfloat16", values.shape, values.dtype)).double() - exact).abs()
    assert (off <= exact.abs() * 2.0**-8 + 1e-40).all()
    off = (through(values, codec_for("int8", values.shape, values.dtype)).double() - exact).abs()
    assert (off <= largest_of_blocks(exact) / 254 * (1 + 1e-4) + SMALLEST_SCALE / 2).all()


@settings(max_examples=40)
@given(SIZES, st.integers(0, 2**31), st.sampled_from([math.nan, math.inf, -math.inf]), st.booleans())
def test_what_is_no_number_does_not_become_one(size: int, seed: int, odd: float, zeros: bool) -> None:
    values = torch.zeros(size) if zeros else sample(size, seed, 1.0, 1.0)
    at = seed % size
    values[at] = odd
    assert torch.equal(
        through(values, codec_for("bfloat16", values.shape, values.dtype))[at].view(1).isnan(),
        values[at].view(1).isnan(),
    )
    got = through(values, codec_for("int8", values.shape, values.dtype))
    block = slice(at // BLOCK * BLOCK, at // BLOCK * BLOCK + BLOCK)
    assert not got[block].isfinite().any()
    if math.isnan(odd):
        assert got[block].isnan().all()
    rest = torch.cat([got[: block.start], got[block.stop :]])
    assert rest.isfinite().all()


def test_zeros_and_whole_steps_are_exact() -> None:
    values = torch.zeros(3 * BLOCK)
    values[BLOCK : 2 * BLOCK] = torch.arange(-64.0, 64.0)
    values[BLOCK] = -127.0
    for dtype in ("bfloat16", "int8"):
        assert torch.equal(through(values, codec_for(dtype, values.shape, values.dtype)), values)


def test_tensors_that_do_not_lie_in_one_piece() -> None:
    values = torch.randn(48, 36).t()
    strided = torch.randn(40, 50)[::2, 1::3]
    for given_ in (values, strided):
        for dtype in ("bfloat16", "int8"):
            code = codec_for(dtype, given_.shape, given_.dtype)
            assert torch.equal(through(given_, code), through(given_.contiguous(), code))


def test_narrower_training_dtypes() -> None:
    values = torch.randn(5, 3 * BLOCK).bfloat16()
    assert codec_for("bfloat16", values.shape, values.dtype) is None
    off = (through(values, codec_for("int8", values.shape, values.dtype)).double() - values.double()).abs()
    largest = largest_of_blocks(values.double().view(-1)).view_as(off)
    assert (off <= largest / 254 * (1 + 1e-4) + largest * 2.0**-8).all()
    wide = torch.randn(7, dtype=torch.float64)
    assert torch.equal(through(wide, codec_for("float32", wide.shape, wide.dtype)), wide.float().double())


@pytest.mark.parametrize("dtype", [None, *LINK_DTYPES])
def test_what_would_not_get_smaller_goes_as_it_is(dtype: str | None) -> None:
    assert codec_for(dtype, (2, 3), torch.int64) is None
    assert codec_for(dtype, (9,), torch.bool) is None
    assert codec_for(dtype, (0, 3), torch.float32) is None
    assert codec_for(dtype, (1,), torch.bfloat16) is None
    assert codec_for("float32", (9,), torch.float32) is None
    assert codec_for("int8", (1,), torch.float32) is None  # a value and its scale are five bytes
    assert codec_for("int8", (), torch.float32) is None


def test_unknown_link_dtype() -> None:
    with pytest.raises(RunError, match="unknown link dtype 'fp4'; there is float32, bfloat16, int8"):
        codec_for("fp4", (1,), torch.float32)


def test_the_planner_counts_the_bytes_that_are_sent() -> None:
    assert tensor_codec.BLOCK == what_if.INT8_BLOCK
    assert link_dtypes.LINK_DTYPES == LINK_DTYPES
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16), ("float64", torch.float64)):
        for link_dtype in link_dtypes.LINK_DTYPES:
            code = codec_for(link_dtype, (3, 4 * BLOCK), dtype)
            full = 12 * BLOCK * dtype.itemsize
            sent = full if code is None else math.prod(code.shape) * code.dtype.itemsize
            assert what_if.sent_share(link_dtype, name) == sent / full
    assert isinstance(codec_for("int8", (BLOCK,), torch.float32), Int8Codec)
