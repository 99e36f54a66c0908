from __future__ import annotations

import pytest

from skyctl.compare.outcome import StrategyOutcome, summarize_outcomes


def test_figures_of_three(three) -> None:
    even, heuristic, optimal = summarize_outcomes(three)
    assert even.layers == "tower 0–6 · laptop 6–12"
    assert (even.predicted_speedup, even.measured_speedup) == (1.0, 1.0)
    assert heuristic.predicted_speedup == pytest.approx(2.5 / 1.6)
    assert heuristic.measured_speedup == pytest.approx(2.5 / 1.7)
    assert heuristic.prediction_error == pytest.approx(1.6 / 1.7 - 1)
    assert optimal.measured is not None
    assert optimal.measured.median == 1.6  # of 1.6, 1.5 and 1.7; the first step, 9.0, is warm-up
    assert optimal.final_loss == pytest.approx(2.7)
    assert optimal.microbatches == 4


def test_a_bound_holds_for_every_plan_of_the_same_problem(three, outcome) -> None:
    even, heuristic, optimal = summarize_outcomes(three)
    assert (even.bound_s, heuristic.bound_s, optimal.bound_s) == (1.5, 1.5, 1.5)
    assert even.gap == pytest.approx(2.5 / 1.5 - 1)
    assert optimal.gap == 0.0
    other = outcome("even", counts=(7, 7))
    assert summarize_outcomes([other, three[2]])[0].bound_s is None


def test_infeasible_says_why_and_is_no_baseline(outcome) -> None:
    even = StrategyOutcome("even", None, "n3 needs 3.1 GiB and has 2.0 GiB")
    best = outcome("optimal", bound_s=2.5, status="optimal")
    first, second = summarize_outcomes([even, best])
    assert first.status == "infeasible"
    assert first.error is not None
    assert "needs" in first.error
    assert first.gap is None
    assert first.predicted_speedup is None
    assert second.predicted_speedup is None
    assert second.gap == 0.0
    assert (
        summarize_outcomes([StrategyOutcome("optimal", error="nothing found in 30 s", undecided=True)])[
            0
        ].status
        == "undecided"
    )


def test_unused_and_whole_ids_where_a_node_has_two_devices(outcome) -> None:
    devices = ("box/cuda:0", "box/cuda:1", "attic/cpu:0")
    (row,) = summarize_outcomes([outcome(devices=devices, counts=(6, 6, 0), compute_s=(1.0, 1.0))])
    assert row.layers == "box/cuda:0 0–6 · box/cuda:1 6–12"
    assert row.unused == ("attic",)


def test_a_run_that_failed_keeps_its_plan(outcome) -> None:
    first, second = summarize_outcomes([outcome("even"), outcome("heuristic", error="rank 1 on laptop died")])
    assert second.error == "rank 1 on laptop died"
    assert second.predicted_speedup == first.predicted_speedup
    assert second.measured is None


def test_nothing() -> None:
    assert summarize_outcomes([]) == []
