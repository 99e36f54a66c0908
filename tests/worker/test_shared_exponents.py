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
    one, small, large = magnitude_code(1.0), magnitude_code(2.0**-5), magnitude_code(2.0**10)
    found = SharedExponents(1, 16)
    assert found.overflows([NONE]), "before the first step"
    found.widen([one])
    assert found.exponents == [1 + HEADROOM_BITS - found.bits]
    found.follow([one])
    assert not found.overflows([one + HEADROOM_BITS])
    assert found.overflows([one + HEADROOM_BITS + 1])
    found.widen([large])
    found.follow([large])
    assert found.exponents == [11 + HEADROOM_BITS - found.bits]
    for _ in range(REMEMBERED - 1):
        found.follow([small])
        assert found.exponents == [11 + HEADROOM_BITS - found.bits]
    found.follow([small])
    assert found.exponents == [-4 + HEADROOM_BITS - found.bits]
    for nothing in (NONE, ZERO, NOT_FINITE):
        assert not found.overflows([nothing])
        for _ in range(2 * REMEMBERED):
            found.follow([nothing])
        assert found.exponents == [-4 + HEADROOM_BITS - found.bits], "steps without a gradient say nothing"


def test_a_model_of_which_nothing_is_trained_has_exponents_too() -> None:
    found = SharedExponents(0, 4)
    assert found.overflows([])
    found.widen([])
    assert not found.overflows([])
    found.follow([])
    assert found.exponents == []


def test_beside_what_is_no_number_everything_fits() -> None:
    found = SharedExponents(1, 16)
    found.widen([NOT_FINITE])
    assert not found.overflows([NOT_FINITE - 1])
    with pytest.raises(RunError, match="all fit their exponents"):
        found.widen([NOT_FINITE])


def test_the_smallest_gradients_have_the_least_exponent() -> None:
    found = SharedExponents(3, 1)
    codes = [magnitude_code(1e-45), ZERO, NONE]
    found.widen(codes)
    assert found.exponents == [LEAST_EXPONENT] * 3
    assert not found.overflows(codes)
    assert found.overflows([magnitude_code(1.0), ZERO, NONE])
