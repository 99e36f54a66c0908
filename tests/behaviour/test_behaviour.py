"""skyctl behaves as recorded (``record.py``): the suite tests a part of it, ``-m recorded`` all of it."""

from __future__ import annotations

import pytest
from tests.behaviour import online, record


def nothing_differs(lines: list[str]) -> None:
    assert not lines, "\n" + "\n".join(lines)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["planner", "help", "commands"])
def test_some_of_it_is_as_recorded(part: str) -> None:
    nothing_differs(record.compare(part, fast=True))


@pytest.mark.recorded
@pytest.mark.parametrize("part", ["planner", "bounded", "commands"])
def test_all_of_it_is_as_recorded(part: str) -> None:
    nothing_differs(record.compare(part))


@pytest.mark.recorded
@pytest.mark.parametrize("name", list(online.ROOMS))
def test_runs_are_as_recorded(name: str) -> None:
    if not online.possible(name):
        pytest.skip("transformers is not installed")
    recorded = record.load("runs")
    nothing_differs(record.changes("runs", recorded, [(name, online.observed(name))]))


def test_a_difference_is_named() -> None:
    recorded = {"machine": {}, "cases": {"x": {"json": {"gap": 0.5, "rows": [1, 2]}, "exit": 0}}}
    present = {"json": {"gap": 0.25, "rows": [1]}, "exit": 0}
    assert record.changes("commands", recorded, [("x", present), ("y", {})]) == [
        "commands: x: /json/gap: recorded 0.5, now 0.25",
        'commands: x: /json/rows/1: recorded 2, now "(not there)"',
        "commands: y: not recorded",
    ]


def test_figures_may_be_off_by_their_last_bits() -> None:
    recorded = {"machine": {}, "cases": {"x": {"value_s": 1.0, "loss": 2.0}}}
    assert record.changes("planner", recorded, [("x", {"value_s": 1.0 + 1e-12, "loss": 2.0})]) == []
    assert record.changes("planner", recorded, [("x", {"value_s": 1.0 + 1e-8, "loss": 2.0})]) != []
    assert record.tolerance("gpt runs/even/loss/0", here=False) < record.tolerance("int8/loss/0", here=False)
