"""The time that a step of a plan takes next to another's, and the room that each needs."""

from __future__ import annotations

import pytest
from tests.planner.data_problems import data_problem, delayed, random_data_problem
from tests.planner.hybrid_problems import random_hybrid_problem

from skyctl.planner.api import plan as plan_problem
from skyctl.planning.shared_runs import memory_needs, shared_run
from skyctl.records.plan import Plan
from skyctl.turns.turn_simulation import shared_step_s


def some_plan(seed: int, *, hybrid: bool) -> Plan:
    problem = random_hybrid_problem(seed) if hybrid else random_data_problem(seed)
    return plan_problem(problem, "optimal")


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_alone_a_step_takes_what_is_predicted_and_next_to_its_like_longer(seed: int, hybrid: bool) -> None:
    plan = some_plan(seed, hybrid=hybrid)
    run = shared_run(plan, 3)
    assert run is not None
    alone_s = plan.predicted.iteration_s
    assert shared_step_s([run], "fair") == [pytest.approx(alone_s, rel=1e-6)]
    both = shared_step_s([run, run], "fair")
    assert all(alone_s * (1 - 1e-6) <= step_s <= 2.5 * alone_s for step_s in both), both


def test_a_rhythm_without_a_step_of_its_own_is_not_played() -> None:
    assert shared_run(plan_problem(delayed(data_problem()), "optimal"), 3) is None


@pytest.mark.parametrize("seed", range(6))
def test_what_a_device_keeps_and_what_it_needs_in_a_turn_are_what_it_needs_alone(seed: int) -> None:
    plan = some_plan(seed, hybrid=True)
    needs = memory_needs(plan)
    for replica in plan.predicted.replicas:
        need = needs[replica.device]
        assert need.persistent_bytes + need.ephemeral_bytes == pytest.approx(replica.memory_bytes)
        assert min(need.persistent_bytes, need.ephemeral_bytes) >= 0
