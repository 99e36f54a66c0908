"""Axes and ticks of the pictures."""

from __future__ import annotations

import pytest

from skyctl.compare.charts.chart import enclosing_ticks, round_ticks, seconds_axis, strategy_look


def test_round_ticks_begin_at_zero() -> None:
    assert round_ticks(0.47, 5) == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])
    assert round_ticks(0.0, 5) == [0.0]


def test_an_axis_of_seconds_writes_a_unit_that_fits() -> None:
    axis = seconds_axis(0.47, "a step", room=1.0)
    assert [text for _, text in axis.ticks()] == ["0", "100", "200", "300", "400"]
    assert axis.label == "ms a step"
    assert axis.percent(0.235) == pytest.approx(50)
    assert axis.width_percent(1e-9) == 0.05


def test_ticks_enclose_the_values() -> None:
    ends = enclosing_ticks([3.7, 5.5])
    assert ends[0] <= 3.7
    assert ends[-1] >= 5.5
    assert len(enclosing_ticks([2.0, 2.0])) > 1


def test_strategies_without_a_look_of_their_own_share_two() -> None:
    strategies = ["even", "a", "b", "c"]
    assert [strategy_look(name, strategies) for name in strategies] == ["even", "other0", "other1", "other0"]
