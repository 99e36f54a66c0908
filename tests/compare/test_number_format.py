"""Figures as people read them."""

from __future__ import annotations

import pytest

from skyctl.compare.number_format import (
    format_bytes,
    format_estimate,
    format_figure,
    format_gap,
    format_percent,
    format_prediction_error,
    format_ratio,
    format_seconds,
    format_seconds_range,
    format_span,
)
from skyctl.records.interval import Interval


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (None, "–"),
        (0.0, "as measured"),
        (-4e-4, "as measured"),
        (2.1, "210.0% too long"),
        (-0.1, "10.0% too short"),
    ],
)
def test_prediction_errors_say_their_direction(error: float | None, text: str) -> None:
    assert format_prediction_error(error) == text


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


@pytest.mark.parametrize(
    ("value_s", "bounds_s", "text"),
    [
        (1.38, (1.36, 1.451), "1.38 s (1.36–1.45)"),
        (0.9, (0.84, 1.06), "900 ms (840–1060)"),
        (1.04, (0.9, 1.2), "1.04 s (0.90–1.20)"),
        (0.0123, (0.012, 0.013), "12.3 ms (12.0–13.0)"),
        (0.0, (0.0, 0.1), "0.00 s (0.00–0.10)"),
    ],
)
def test_estimates_have_one_unit_and_the_same_digits(
    value_s: float, bounds_s: tuple[float, float], text: str
) -> None:
    interval = Interval(low_s=bounds_s[0], high_s=bounds_s[1])
    assert format_estimate(value_s, interval) == text


def test_an_estimate_without_an_interval_is_a_time() -> None:
    assert format_estimate(1.38, None) == "1.38 s"
    assert format_estimate(None, None) == "–"


def test_ratios_percents_and_gaps() -> None:
    assert (format_ratio(1.789), format_ratio(None)) == ("1.79×", "–")
    assert (format_percent(-0.0241), format_percent(0.5), format_percent(-1e-9)) == (
        "−2.4%",
        "+50.0%",
        "+0.0%",
    )
    assert (format_gap(0.0), format_gap(1e-12), format_gap(0.02), format_gap(None)) == (
        "proved",
        "proved",
        "+2.0%",
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


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (89.0, "89 s"),
        (720.0, "12 min"),
        (108_000.0, "30 h"),
        (3 * 86_400.0, "3 d"),
        (1.795e9, "56 years"),
    ],
)
def test_long_times(seconds: float, text: str) -> None:
    assert format_span(seconds) == text
