"""The predicted time of a step beside runs whose folders say that they take turns on its devices."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from tests.planner.data_problems import data_problem, delayed

from skyctl.files import write_atomic
from skyctl.planner.api import plan as plan_problem
from skyctl.records.plan import Plan
from skyctl.run.run_options import RunOptions
from skyctl.supervision.run_status import list_runs
from skyctl.supervision.shared_devices import SharedStep, sharing_runs, step_beside

from ..helpers.watched_runs import write_state

CLUSTER = "/here/cluster.yaml"


def under_way(run_id: str, plan: Plan, turns: str | None, **more: str) -> str:
    """A run of the plan that is kept in the state folder."""
    order = {"options": asdict(RunOptions(steps=20, turns=turns))}
    paths = write_state(run_id, order=order, **{"cluster_file": CLUSTER, **more})
    write_atomic(paths.newest_plan, plan.to_json())
    return run_id


def beside(plan: Plan, turns: str | None = None) -> SharedStep | None:
    runs, faults = list_runs(every=False)
    assert faults == []
    return step_beside(plan, 20, turns, CLUSTER, sharing_runs(runs))


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_problem(data_problem(), "optimal")


def test_next_to_runs_that_take_turns_a_step_takes_longer(plan: Plan) -> None:
    assert beside(plan) is None
    under_way("20261121-040401-aaaa", plan, None)
    under_way("20261121-040402-aaaa", plan, "fair", cluster_file="/there/cluster.yaml")
    under_way("20261121-040403-aaaa", plan, "fair", status="done")
    assert beside(plan) is None, "it takes no turns, is of another cluster, has ended"
    first, second = (under_way(f"20261121-04040{n}-aaaa", plan, "fair") for n in (4, 5))
    found = beside(plan)
    assert found is not None
    assert (found.turns, set(found.beside)) == ("fair", {first, second})
    assert found.alone_s == plan.predicted.iteration_s
    assert found.step_s is not None
    assert 1.5 * found.alone_s < found.step_s < 3.5 * found.alone_s


def test_the_highest_priority_is_hardly_slower(plan: Plan) -> None:
    under_way("20261121-040401-aaaa", plan, "priority=3")
    first, last = beside(plan, "priority=9"), beside(plan, "priority=1")
    assert first is not None
    assert last is not None
    assert first.step_s is not None
    assert last.step_s is not None
    assert first.step_s < 1.5 * first.alone_s < last.step_s


def test_where_policies_differ_or_steps_have_no_end_of_their_own_nothing_is_predicted(plan: Plan) -> None:
    run = under_way("20261121-040401-aaaa", plan, "fair")
    late = plan_problem(delayed(data_problem()), "optimal")
    for found in (beside(plan, "srtf"), beside(late)):
        assert found is not None
        assert (found.beside, found.step_s) == ((run,), None)
    under_way("20261121-040402-aaaa", late, "fair")
    found = beside(plan)
    assert found is not None
    assert found.step_s is None
