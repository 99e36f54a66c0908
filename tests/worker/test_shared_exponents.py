"""Exponents that ranks share: they follow from codes alone, widen at once and narrow later."""

from __future__ import annotations

import math

import pytest

from skyctl.errors import RunError
from skyctl.worker.sums.shared_exponents import (
    HEADROOM_BITS,
    LEAST_EXPONENT,
    NONE,
    NOT_FINITE,
    REMEMBERED,
    ZERO,
    SharedExponents,
    magnitude_code,
)


def test_codes_grow_with_magnitudes_and_name_what_is_no_number() -> None:
    given = [0.0, 1e-45, 2.0**-60, 0.9, 1.0, 1.5, 2.0**100, 3.4e38]
    codes = [magnitude_code(m) for m in given]
    assert codes == sorted(codes)
    assert codes[0] == ZERO
    assert codes[3] + 1 == codes[4] == codes[5]
    for odd in (math.nan, math.inf, 1e300):
        assert magnitude_code(odd) == NOT_FINITE
    assert max(codes) < NOT_FINITE


@pytest.mark.parametrize("microbatches", [1, 2, 3, 16, 1000, 100_000])
def test_no_sum_of_integers_overflows_and_none_is_smaller_than_it_must_be(microbatches: int) -> None:
    bits = SharedExponents(1, microbatches).bits
    assert microbatches * 2**bits < 2**31 <= microbatches * 2 ** (bits + 1) + microbatches


def test_they_widen_at_once_and_narrow_after_a_while() -> None:
    unit, small, large = magnitude_code(1.0), magnitude_code(2.0**-5), magnitude_code(2.0**10)
    exponents = SharedExponents(1, 16)
    assert exponents.overflows([NONE]), "before the first step"
    exponents.widen([unit])
    assert exponents.exponents == [1 + HEADROOM_BITS - exponents.bits]
    exponents.follow([unit])
    assert not exponents.overflows([unit + HEADROOM_BITS])
    assert exponents.overflows([unit + HEADROOM_BITS + 1])
    exponents.widen([large])
    exponents.follow([large])
    assert exponents.exponents == [11 + HEADROOM_BITS - exponents.bits]
    for _ in range(REMEMBERED - 1):
        exponents.follow([small])
        assert exponents.exponents == [11 + HEADROOM_BITS - exponents.bits]
    exponents.follow([small])
    assert exponents.exponents == [-4 + HEADROOM_BITS - exponents.bits]
    for nothing in (NONE, ZERO, NOT_FINITE):
        assert not exponents.overflows([nothing])
        for _ in range(2 * REMEMBERED):
            exponents.follow([nothing])
        assert exponents.exponents == [-4 + HEADROOM_BITS - exponents.bits], (
            "steps without a gradient say nothing"
        )


def test_a_model_of_which_nothing_is_trained_has_exponents_too() -> None:
    exponents = SharedExponents(0, 4)
    assert exponents.overflows([])
    exponents.widen([])
    assert not exponents.overflows([])
    exponents.follow([])
    assert exponents.exponents == []


def test_beside_what_is_no_number_everything_fits() -> None:
    exponents = SharedExponents(1, 16)
    exponents.widen([NOT_FINITE])
    assert not exponents.overflows([NOT_FINITE - 1])
    with pytest.raises(RunError, match="all fit their exponents"):
        exponents.widen([NOT_FINITE])


def test_the_smallest_gradients_have_the_least_exponent() -> None:
    exponents = SharedExponents(3, 1)
    codes = [magnitude_code(1e-45), ZERO, NONE]
    exponents.widen(codes)
    assert exponents.exponents == [LEAST_EXPONENT] * 3
    assert not exponents.overflows(codes)
    assert exponents.overflows([magnitude_code(1.0), ZERO, NONE])
