"""The results that count as worse or better than the recording, and that forged plans are refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from planner_record import RECORD, SECTIONS
from planner_values.comparing import BETTER, EQUAL, LOOK, WORSE, compare_forgeries, compare_rows
from planner_values.forgeries import FORGERIES, forged
from planner_values.instances import FORMS, STRATEGIES, mixed
from planner_values.outcomes import Outcome, observed

PROVED = Outcome("optimal", 2.0, 2.0, "search")
BOUNDED = Outcome("bounded", 2.0, 1.6, "witness")


@pytest.mark.parametrize(
    ("before", "now", "kind", "verdict"),
    [
        (BOUNDED, replace(BOUNDED, value_s=2.1), "value", WORSE),
        (BOUNDED, replace(BOUNDED, value_s=1.9), "value", BETTER),
        (BOUNDED, replace(BOUNDED, value_s=2.0 + 1e-12), "value", EQUAL),
        (BOUNDED, replace(BOUNDED, bound_s=1.5), "gap", WORSE),
        (BOUNDED, replace(BOUNDED, value_s=3.0, bound_s=2.5), "value", WORSE),  # 2.0 s were reached
        (BOUNDED, PROVED, "status", BETTER),
        (PROVED, BOUNDED, "status", WORSE),
        (PROVED, replace(PROVED, value_s=1.5, bound_s=1.5), "value", LOOK),
        (PROVED, replace(PROVED, proof="unchecked"), "proof", WORSE),
        (PROVED, replace(PROVED, proof="witness"), "proof", EQUAL),
        (PROVED, replace(PROVED, disagrees="predict"), "agrees", WORSE),
        (PROVED, Outcome("exit 3"), "status", WORSE),
        (Outcome("exit 2"), PROVED, "status", BETTER),
        (Outcome("exit 3"), PROVED, "status", LOOK),
        (Outcome("exit 1"), Outcome("exit 3"), "status", BETTER),
    ],
)
def test_a_case_is_worse_equal_or_better(before, now, kind, verdict):
    tally = compare_rows([("x", before, now)], loose=False)
    assert tally.counts[kind, verdict] == 1
    assert (tally.worse > 0) == (verdict == WORSE)


def test_the_clock_may_change_what_it_ends():
    now = replace(BOUNDED, value_s=2.03, bound_s=1.61)
    assert compare_rows([("x", BOUNDED, now)], loose=False).worse
    assert not compare_rows([("x", BOUNDED, now)], loose=True).worse
    assert compare_rows([("x", PROVED, replace(PROVED, value_s=2.01, bound_s=2.01))], loose=True).worse


def test_forgeries_that_are_no_longer_refused_or_tried_are_worse():
    assert not compare_forgeries({"x": [4, 4]}, {"x": [9, 9]}).worse
    assert compare_forgeries({"x": [4, 4]}, {"x": [8, 9]}).worse
    assert compare_forgeries({"x": [4, 4]}, {}).worse
    assert not compare_forgeries({"x": [4, 4]}, {}, some=True).worse


@pytest.mark.slow
def test_forged_plans_of_every_strategy_and_form_are_refused():
    tried = set()
    for _, strategy, form, problem in mixed(3):
        made = observed(problem, strategy, 60.0, checked=False)[1]
        if made is None or len(made.placed_stages) < 2:
            continue
        for kind, refused in forged(made, strategy, 60.0):
            assert refused, (strategy, form, kind)
            tried.add(kind)
    assert len(tried) > len(FORGERIES) / 2


def test_the_recording_has_every_strategy_and_form_and_agrees_with_itself():
    record = json.loads(Path(RECORD).read_text(encoding="utf-8"))
    assert set(record) == set(SECTIONS)
    rows = {name: Outcome.of_row(row) for name, row in record["mixed"]["rows"].items()}
    assert {name.rpartition(" ")[0] for name in rows} == {f"{s}, {f}" for s in STRATEGIES for f in FORMS}
    assert not any(one.disagrees for one in rows.values())
    assert all(refused == tried for refused, tried in record["forgeries"]["kinds"].values())
