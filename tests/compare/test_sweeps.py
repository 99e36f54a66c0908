from __future__ import annotations

import pytest

from skyctl.compare.outcome import StrategyOutcome, summarize_outcomes
from skyctl.compare.sweeps import (
    ComparisonSweep,
    NodesPoint,
    add_measured_steps,
    describe_sweep,
    nodes_sweep,
    speedup_at,
    sweep_point,
    sweep_table,
)


@pytest.fixture
def nodes(outcome) -> ComparisonSweep:
    """One node, a second that halves the step, a third that is left unused."""
    alone = [outcome("optimal", devices=("a/cpu:0",), counts=(12,), compute_s=(4.0,), step_s=4.0)]
    two = [outcome("optimal", devices=("a/cpu:0", "laptop/cpu:0"), step_s=2.0)]
    devices = ("a/cpu:0", "laptop/cpu:0", "c/cpu:0")
    three = [outcome("optimal", devices=devices, counts=(6, 6, 0), compute_s=(1.0, 1.0), step_s=2.0)]
    names = ("a", "laptop", "c")
    return nodes_sweep(
        [NodesPoint(names[: i + 1], outcomes) for i, outcomes in enumerate((alone, two, three))], 2
    )


def test_whether_a_machine_pays(nodes: ComparisonSweep) -> None:
    assert describe_sweep(nodes) == [
        "adding laptop pays: 2.00× as fast, 2.00 s a step, predicted",
        "adding c does not pay: the best plan leaves it unused",
    ]
    assert [speedup_at(nodes, i) for i in range(3)] == [1.0, 2.0, 2.0]


def test_the_table_marks_what_was_chosen(nodes: ComparisonSweep, outcome) -> None:
    measured = add_measured_steps(
        nodes, summarize_outcomes([outcome("optimal", step_s=2.0, steps_s=[9.0, 2.1])])
    )
    heads, lines = sweep_table(measured)
    assert heads == ["nodes", "added", "optimal", "above bound", "optimal over 1 node"]
    assert lines[1] == ["2 *", "laptop", "2.00 s (measured 2.10 s)", "–", "2.00×"]
    assert measured.line("optimal", measured=True) == [(1, 2.1)]


def test_what_does_not_fit_has_no_figures(outcome) -> None:
    none = [StrategyOutcome("even", None, "too small"), StrategyOutcome("optimal", None, "too small")]
    some = [StrategyOutcome("even", None, "too small"), outcome("optimal", step_s=2.0)]
    sweep = ComparisonSweep(
        kind="nodes", points=(sweep_point(1, none), sweep_point(2, some, added="b")), chosen=None
    )
    assert sweep_table(sweep)[1][0] == ["1", "", "does not fit", "does not fit", "–", "–"]
    assert describe_sweep(sweep) == ["with b (2 nodes) there is a plan that fits: 2.00 s a step"]
    nowhere = ComparisonSweep(kind="microbatches", points=(sweep_point(4, none),))
    assert describe_sweep(nowhere) == ["optimal has no plan that fits at any of these"]
    assert describe_sweep(ComparisonSweep(kind="nodes", points=())) == []


def test_the_best_number_of_microbatches(outcome) -> None:
    sweep = ComparisonSweep(
        kind="microbatches",
        points=(
            sweep_point(4, [outcome("optimal", step_s=3.0)]),
            sweep_point(8, [outcome("optimal", step_s=2.0)]),
        ),
        chosen=8,
    )
    assert describe_sweep(sweep) == ["optimal is fastest with 8 microbatches: 2.00 s a step, predicted"]


def test_points_that_were_run_are_compared_by_what_was_measured(outcome) -> None:
    alone = [outcome("optimal", counts=(12, 0), compute_s=(4.0,), step_s=4.0, steps_s=[9.0, 3.9, 4.0, 4.1])]
    two = [outcome("optimal", step_s=2.5, steps_s=[9.0, 3.9, 4.0, 4.1])]
    sweep = nodes_sweep([NodesPoint(("tower",), alone), NodesPoint(("tower", "laptop"), two)], 2)
    assert sweep.line("optimal", measured=True) == [(0, 4.0), (1, 4.0)]
    assert sweep_table(sweep)[1][1][-1] == "1.00×"
    assert describe_sweep(sweep) == [
        "adding laptop makes no difference that can be told: 4.00 s a step, measured"
    ]
    fast = [outcome("optimal", step_s=2.5, steps_s=[9.0, 1.9, 2.0, 2.1])]
    sweep = nodes_sweep([NodesPoint(("tower",), alone), NodesPoint(("tower", "laptop"), fast)], 2)
    assert describe_sweep(sweep) == ["adding laptop pays: 2.00× as fast, 2.00 s a step, measured"]
    assert sweep.points[1].gain.low < 2 < sweep.points[1].gain.high


def test_each_row_is_measured_at_its_own_number_of_microbatches(outcome) -> None:
    planned = [[outcome("alone", microbatches=m), outcome("optimal", microbatches=m)] for m in (4, 8)]
    points = tuple(sweep_point(m, outcomes) for m, outcomes in zip((4, 8), planned, strict=True))
    sweep = ComparisonSweep(kind="microbatches", points=points, chosen=8)
    ran = [
        outcome("alone", microbatches=4, steps_s=[9.0, 2.1]),
        outcome("optimal", microbatches=8, steps_s=[9.0, 2.2]),
    ]
    measured = add_measured_steps(sweep, summarize_outcomes(ran))
    assert measured.line("alone", measured=True) == [(0, 2.1)]
    assert measured.line("optimal", measured=True) == [(1, 2.2)]
