"""The document of a comparison, its verdict, and its best row."""

from __future__ import annotations

import json

from skyctl.compare.comparison import Comparison, describe_verdict, pick_best_row
from skyctl.compare.outcome import StrategyOutcome, summarize_outcomes
from skyctl.compare.sweeps import ComparisonSweep, sweep_point
from skyctl.records.base import parse


def test_verdicts(three, outcome) -> None:
    assert describe_verdict([]) == "no strategy gives a plan that fits"
    assert (
        describe_verdict(summarize_outcomes(three[:1]))
        == "nothing beats even here: 2.50 s a step, predicted; 2.50 s measured"
    )
    slow = outcome("optimal", compute_s=(1.0, 1.2), step_s=1.25, steps_s=[9.0, 5.0])
    assert describe_verdict(summarize_outcomes([three[0], slow])) == (
        "nothing beat even when it was run: optimal was predicted 2.00× faster, and measured 0.50×"
    )
    none = StrategyOutcome("even", None, "too small")
    assert (
        describe_verdict(summarize_outcomes([none, outcome("optimal")]))
        == "even does not fit; optimal takes 2.50 s a step, predicted"
    )
    same = summarize_outcomes(
        [outcome("even"), outcome("heuristic", step_s=2.0), outcome("optimal", step_s=2.0, status="optimal")]
    )
    best = pick_best_row(same)
    assert best is not None
    assert best.strategy == "optimal"


def test_a_heading_begins_with_a_capital_or_a_strategys_name(three, outcome) -> None:
    assert describe_verdict([], capitalized=True) == "No strategy gives a plan that fits"
    even = summarize_outcomes(three[:1])
    assert describe_verdict(even, capitalized=True).startswith("Nothing beats even here")
    assert describe_verdict(summarize_outcomes(three), capitalized=True).startswith("optimal is")
    none = summarize_outcomes([StrategyOutcome("even", None, "too small"), outcome("optimal")])
    assert describe_verdict(none, capitalized=True).startswith("even does not fit")


def _document(compared, **fields) -> str:
    return json.dumps(Comparison(rows=tuple(compared), **fields).model_dump(mode="json"))


def test_document_is_a_record_of_its_own(three) -> None:
    rows = summarize_outcomes(three)
    text = _document(rows, cluster="home", workload="gpt:layers=2", files={"plot": "a.png"})
    again = parse(Comparison, text, "here")
    assert again.rows == tuple(rows)
    assert json.loads(text)["version"] == 1  # it says nothing that version 1 can't hold


def test_sweeps_and_verdict_are_of_version_2(three) -> None:
    sweep = ComparisonSweep(kind="microbatches", points=(sweep_point(4, three),), chosen=4)
    text = _document(summarize_outcomes(three), sweeps=(sweep,), verdict="even wins")
    again = parse(Comparison, text, "here")
    assert json.loads(text)["version"] == 2
    assert again.sweeps == (sweep,)
