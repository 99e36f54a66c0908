from __future__ import annotations

import pytest

from skyctl.compare.rows import Outcome, rows
from skyctl.compare.sweeps import Sweep, gain, point, sentences, table_of, with_measured


@pytest.fixture
def nodes(outcome) -> Sweep:
    """One node, a second that halves the step, a third that is left unused."""
    one = [outcome("optimal", counts=(12, 0), compute_s=(4.0,), step_s=4.0)]
    two = [outcome("optimal", step_s=2.0, steps_s=[9.0, 2.1])]
    devices = ("a/cpu:0", "b/cpu:0", "c/cpu:0")
    three = [outcome("optimal", devices=devices, counts=(6, 6, 0), compute_s=(1.0, 1.0), step_s=2.0)]
    points = (point(1, one), point(2, two, added="laptop"), point(3, three, added="c"))
    return Sweep(kind="nodes", points=points, chosen=2)


def test_whether_a_machine_pays(nodes: Sweep) -> None:
    assert sentences(nodes) == [
        "adding laptop pays: 2.00× faster, 2.00 s a step",
        "adding c does not pay: the best plan leaves it unused",
    ]
    assert [gain(nodes, i) for i in range(3)] == [1.0, 2.0, 2.0]


def test_the_table_marks_what_was_chosen(nodes: Sweep, outcome) -> None:
    measured = with_measured(nodes, rows([outcome("optimal", step_s=2.0, steps_s=[9.0, 2.1])]))
    heads, lines = table_of(measured)
    assert heads == ["nodes", "added", "optimal", "above bound", "optimal over 1 node"]
    assert lines[1] == ["2 *", "laptop", "2.00 s (measured 2.10 s)", "–", "2.00×"]
    assert measured.line("optimal", measured=True) == [(1, 2.1)]


def test_what_does_not_fit_has_no_figures(outcome) -> None:
    none = [Outcome("even", None, "too small"), Outcome("optimal", None, "too small")]
    some = [Outcome("even", None, "too small"), outcome("optimal", step_s=2.0)]
    sweep = Sweep(kind="nodes", points=(point(1, none), point(2, some, added="b")), chosen=None)
    assert table_of(sweep)[1][0] == ["1", "", "does not fit", "does not fit", "–", "–"]
    assert sentences(sweep) == ["with b (2 nodes) there is a plan that fits: 2.00 s a step"]
    nowhere = Sweep(kind="microbatches", points=(point(4, none),))
    assert sentences(nowhere) == ["optimal has no plan that fits at any of these"]
    assert sentences(Sweep(kind="nodes", points=())) == []


def test_the_best_number_of_microbatches(outcome) -> None:
    sweep = Sweep(
        kind="microbatches",
        points=(point(4, [outcome("optimal", step_s=3.0)]), point(8, [outcome("optimal", step_s=2.0)])),
        chosen=8,
    )
    assert sentences(sweep) == ["optimal is fastest with 8 microbatches: 2.00 s a step, predicted"]
