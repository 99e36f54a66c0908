"""Depth to spare never costs time, never more memory than there is, and helps where links are slower."""

import pytest
from planner_problems import random_problem

from skyctl import InfeasibleError, plan
from skyctl.planner.depths import refined, value_s
from skyctl.planner.evaluate import step_s
from skyctl.planner.model import Model, Piece
from skyctl.planner.steady import _with_slower_links, steadied


@pytest.mark.parametrize("seed", range(40))
def test_no_step_is_longer_and_everything_fits(seed):
    given = random_problem(seed, objective="iteration", schedule="eager-1f1b", linked=1.0)
    try:
        made = plan(given, "heuristic")
    except InfeasibleError:
        return
    model = Model(given)
    pieces = [Piece(model.index(s.replicas[0].device), s.start, s.stop) for s in made.stages]
    value, running = refined(model, pieces, *value_s(model, pieces))
    after, deeper = steadied(model, pieces, value, running)
    assert after <= value * (1 + 1e-9)
    assert deeper.flying[-1] == running.flying[-1]
    assert list(deeper.flying) == sorted(deeper.flying, reverse=True)
    assert all(a >= b for a, b in zip(deeper.flying, running.flying, strict=True))
    slower = Model(_with_slower_links(given))
    assert step_s(slower, pieces, deeper) <= step_s(slower, pieces, running) * (1 + 1e-9)
    assert all(
        model.fits(d, p, q, k, behind, again)
        for (d, p, q), k, behind, again in zip(pieces, *deeper, strict=True)
    )


def test_without_links_nothing_is_deeper():
    given = random_problem(3, objective="iteration", schedule="eager-1f1b", linked=0.0)
    given = given.model_copy(update={"links": (), "shared": ()})
    model = Model(given)
    pieces = [Piece(0, 0, 1), Piece(1, 1, len(given.layers))]
    value, running = value_s(model, pieces)
    assert steadied(model, pieces, value, running) == (value, running)
