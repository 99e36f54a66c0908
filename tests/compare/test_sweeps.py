from __future__ import annotations

import pytest

from skyctl.compare.outcome import StrategyOutcome, summarize_outcomes
from skyctl.compare.sweeps import (
    ComparisonSweep,
    add_measured_steps,
    describe_sweep,
    speedup_at,
    sweep_point,
    sweep_table,
)


@pytest.fixture
def nodes(outcome) -> ComparisonSweep:
    """One node, a second that halves the step, a third that is left unused."""
    one = [outcome("optimal", counts=(12, 0), compute_s=(4.0,), step_s=4.0)]
    two = [outcome("optimal", step_s=2.0, steps_s=[9.0, 2.1])]
    devices = ("a/cpu:0", "b/cpu:0", "c/cpu:0")
    three = [outcome("optimal", devices=devices, counts=(6, 6, 0), compute_s=(1.0, 1.0), step_s=2.0)]
    points = (sweep_point(1, one), sweep_point(2, two, added="laptop"), sweep_point(3, three, added="c"))
    return ComparisonSweep(kind="nodes", points=points, chosen=2)


def test_whether_a_machine_pays(nodes: ComparisonSweep) -> None:
    assert describe_sweep(nodes) == [
        "adding laptop pays: 2.00× faster, 2.00 s a step",
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
