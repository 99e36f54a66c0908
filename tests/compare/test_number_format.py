"""Figures as people read them."""

from __future__ import annotations

import pytest

from skyctl.compare.number_format import (
    format_bytes,
    format_figure,
    format_gap,
    format_percent,
    format_ratio,
    format_seconds,
    format_seconds_range,
)


@pytest.mark.parametrize(
    ("value_s", "text"),
    [
        (None, "–"),
        (0.0, "0.00 s"),
        (1.6149, "1.61 s"),
        (0.99949, "999 ms"),
        (0.9996, "1.00 s"),
        (0.084, "84.0 ms"),
        (9.996, "10.0 s"),
        (3e-5, "30.0 µs"),
        (120.0, "120 s"),
    ],
)
def test_seconds(value_s: float | None, text: str) -> None:
    assert format_seconds(value_s) == text


def test_ratios_percents_and_gaps() -> None:
    assert (format_ratio(1.789), format_ratio(None)) == ("1.79×", "–")
    assert (format_percent(-0.0241), format_percent(0.5), format_percent(-1e-9)) == (
        "−2.4 %",
        "+50.0 %",
        "+0.0 %",
    )
    assert (format_gap(0.0), format_gap(1e-12), format_gap(0.02), format_gap(None)) == (
        "proved",
        "proved",
        "+2.0 %",
        "–",
    )


def test_a_range_says_its_unit_only_where_it_must() -> None:
    assert format_seconds_range(1.58, 1.71) == "1.58–1.71"
    assert format_seconds_range(0.831, 1.06) == "831 ms–1.06 s"


def test_bytes_and_figures() -> None:
    assert (format_bytes(None), format_bytes(12), format_bytes(8e9)) == (
        "unlimited memory",
        "12 B",
        "7.45 GiB",
    )
    assert [format_figure(x) for x in (None, 0.0421, 4.21, 42.1, 421.0, 4210.0)] == [
        "–", "0.0421", "4.21", "42.1", "421", "4210",
    ]  # fmt: skip
