"""The document of a comparison."""

from __future__ import annotations

import json

from skyctl.compare.comparison import Comparison
from skyctl.compare.conclusion import conclude
from skyctl.compare.outcome import summarize_outcomes
from skyctl.compare.sweeps import ComparisonSweep, sweep_point
from skyctl.records.base import parse


def _document(compared, **fields) -> str:
    return json.dumps(Comparison(rows=tuple(compared), **fields).model_dump(mode="json"))


def test_document_is_a_record_of_its_own(three) -> None:
    rows = summarize_outcomes(three)
    text = _document(rows, cluster="home", workload="gpt:layers=2", files={"plot": "a.svg"})
    again = parse(Comparison, text, "here")
    assert again.rows == tuple(rows)


def test_sweeps_and_verdict_are_in_it(three) -> None:
    sweep = ComparisonSweep(kind="microbatches", points=(sweep_point(4, three),), chosen=4)
    text = _document(summarize_outcomes(three), sweeps=(sweep,), verdict="even wins")
    again = parse(Comparison, text, "here")
    assert again.sweeps == (sweep,)


def test_intervals_and_the_conclusion_are_in_it(three, outcome) -> None:
    sure = outcome("optimal", compute_s=(1.0, 1.2), step_s=1.5, interval_s=(1.4, 1.8))
    rows = summarize_outcomes([three[0], sure])
    text = _document(rows, conclusion=conclude([three[0], sure]))
    again = parse(Comparison, text, "here")
    assert again.rows[1].predicted_interval == sure.plan.predicted.interval
    assert again.conclusion == conclude([three[0], sure])
