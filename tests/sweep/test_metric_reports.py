"""The lines that are reports, and the trials that are behind."""

from __future__ import annotations

import math

import pytest

from skyctl.sweep.metric_reports import LearningCurves, Report, read_report


@pytest.mark.parametrize(
    ("line", "report"),
    [
        ('{"step": 3, "loss": 0.5}', Report(0.5, 3)),
        ('  {"loss": 2}\r', Report(2.0, None)),
        ('{"loss": 1, "step": "three"}', Report(1.0, None)),
        ('{"loss": 1, "step": -1}', Report(1.0, None)),
        ('{"loss": -Infinity}', Report(-math.inf, None)),
        ('{"loss": 1' + "0" * 400 + "}", Report(math.inf, None)),
        ('{"loss": "0.5"}', None),
        ('{"loss": true}', None),
        ('{"accuracy": 1}', None),
        ('{"loss": 1', None),
        ("loss: 0.5", None),
        ("[1]", None),
        ("{" * 100_000, None),
    ],
)
def test_reports(line: str, report: Report | None) -> None:
    assert read_report(line, "loss") == report


def curves_of(costs: dict[int, list[float]], grace: int = 2, mode: str = "min") -> LearningCurves:
    curves = LearningCurves("min" if mode == "min" else "max", grace)
    for number, values in costs.items():
        for value in values:
            curves.add(number, Report(value))
    return curves


GOOD = {1: [1.0, 0.5, 0.1], 2: [1.0, 0.6, 0.2], 3: [1.0, 0.7, 0.3]}


def test_a_trial_worse_than_the_median_of_the_others_is_behind() -> None:
    assert curves_of({**GOOD, 4: [3.0, 2.0]}).is_behind(4)
    assert not curves_of({**GOOD, 4: [3.0, 0.6]}).is_behind(4)  # it is the median
    assert not curves_of({**GOOD, 4: [0.1, 9.0]}).is_behind(4)  # its best so far counts
    assert curves_of({**GOOD, 4: [3.0, math.nan]}).is_behind(4)
    negative = {number: [-value for value in values] for number, values in {**GOOD, 4: [3.0, 2.0]}.items()}
    assert curves_of(negative, mode="max").is_behind(4)
    assert not curves_of(negative, mode="min").is_behind(4)


def test_nobody_is_behind_before_its_grace_or_without_others_as_far() -> None:
    assert not curves_of({**GOOD, 4: [3.0]}).is_behind(4)
    assert not curves_of({1: GOOD[1], 2: GOOD[2], 4: [3.0, 2.0]}).is_behind(4)
    assert not curves_of({**GOOD, 4: [3.0] * 4}).is_behind(4)  # it is ahead of the others
    forgotten = curves_of({**GOOD, 4: [3.0, 2.0]})
    forgotten.forget(1)
    assert not forgotten.is_behind(4)
    assert not forgotten.is_behind(5)


def test_steps_are_the_scripts_or_counted() -> None:
    curves = LearningCurves("min", 1)
    assert [curves.add(1, Report(1.0, step)) for step in (10, 20, None)] == [10, 20, 3]
