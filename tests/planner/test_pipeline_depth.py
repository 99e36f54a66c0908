"""Slack in depth never costs time, never more memory than there is, and helps where links are slower."""

import pytest
from tests.planner.planner_problems import random_problem

from skyctl import InfeasibleError, plan
from skyctl.planner.cost_model import CostModel, StageAssignment
from skyctl.planner.evaluation import step_s
from skyctl.planner.pipeline_depth import _with_slower_links, add_slack, choose_execution, refine_execution


@pytest.mark.parametrize("seed", range(40))
def test_no_step_is_longer_and_everything_fits(seed):
    given = random_problem(seed, objective="iteration", schedule="eager-1f1b", linked=1.0)
    try:
        planned = plan(given, "heuristic")
    except InfeasibleError:
        return
    model = CostModel(given)
    placement = [StageAssignment(model.index(s.replicas[0].device), s.start, s.stop) for s in planned.stages]
    value, execution = refine_execution(model, placement, *choose_execution(model, placement))
    after, deeper = add_slack(model, placement, value, execution)
    assert after <= value * (1 + 1e-9)
    assert deeper.in_flight[-1] == execution.in_flight[-1]
    assert list(deeper.in_flight) == sorted(deeper.in_flight, reverse=True)
    assert all(a >= b for a, b in zip(deeper.in_flight, execution.in_flight, strict=True))
    slower = CostModel(_with_slower_links(given))
    assert step_s(slower, placement, deeper) <= step_s(slower, placement, execution) * (1 + 1e-9)
    assert all(
        model.fits(d, p, q, k, deferred, again)
        for (d, p, q), k, deferred, again in zip(placement, *deeper, strict=True)
    )


def test_without_links_nothing_is_deeper():
    given = random_problem(3, objective="iteration", schedule="eager-1f1b", linked=0.0)
    given = given.model_copy(update={"links": (), "shared": ()})
    model = CostModel(given)
    placement = [StageAssignment(0, 0, 1), StageAssignment(1, 1, len(given.layers))]
    value, execution = choose_execution(model, placement)
    assert add_slack(model, placement, value, execution) == (value, execution)
