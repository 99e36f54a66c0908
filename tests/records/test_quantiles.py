from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyctl.records.measurement import median, quantile, quantiles

TIMES = st.lists(st.floats(0, 1e6), min_size=1, max_size=50)


def test_by_hand() -> None:
    quartiles = quantiles([3.0, 1.0, 2.0, 4.0, 5.0])
    assert (quartiles.median, quartiles.p10, quartiles.p90) == pytest.approx((3.0, 1.4, 4.6))
    assert quantiles([7.0]) == quantiles([7.0, 7.0, 7.0])
    assert median([1.0, 2.0]) == 1.5


@given(TIMES)
def test_is_numpys_default(values: list[float]) -> None:
    import numpy as np

    assert quantile(values, 0.5) == pytest.approx(float(np.quantile(values, 0.5)), rel=1e-9, abs=1e-9)
    assert quantile(values, 0.1) == pytest.approx(float(np.quantile(values, 0.1)), rel=1e-9, abs=1e-9)


@given(TIMES)
def test_ordered_and_within(values: list[float]) -> None:
    assert min(values) <= quantile(values, 0.1) <= median(values) <= quantile(values, 0.9) <= max(values)


def test_no_values() -> None:
    with pytest.raises(ValueError, match="no values"):
        quantiles([])
    with pytest.raises(ValueError, match="share"):
        quantile([1.0], 1.5)
