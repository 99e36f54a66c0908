"""One model of a step: what ``play`` makes of a candidate is what searches compute in closed form."""

from __future__ import annotations

import time

import pytest
from tests.planner.data_problems import data_problem, random_data_problem
from tests.planner.hybrid_problems import random_hybrid_problem

from skyctl import InfeasibleError, plan, predict
from skyctl.errors import InputError, UndecidedError
from skyctl.planner import joint_sums
from skyctl.planner.data.data_placement import asked_groups
from skyctl.planner.data.replica_costs import ReplicaCosts
from skyctl.planner.plan_record import read_candidate
from skyctl.planner.requirements import CONFLICTS, require_consistent
from skyctl.planner.step import play
from skyctl.planner.step_costs import StepCosts
from skyctl.records.rhythm import Rhythm


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("seed", range(25))
def test_replicas_in_closed_form_take_what_is_played(seed: int, delay: int) -> None:
    """Rings, stars and packed trees of all devices, helpers included, in every format of sums."""
    problem = random_data_problem(seed)
    if delay and problem.sync_format == "fixed32":
        return
    model = ReplicaCosts(problem.model_copy(update={"rhythm": Rhythm(delay=delay)}))
    replicas = tuple(d for d in range(model.devices) if model.fitting_cost(d) is not None)
    replicas = replicas[: problem.microbatches]
    for group in asked_groups(model, replicas, time.perf_counter() + 0.5) if replicas else ():
        placed = group.best_placement(problem.microbatches)
        assert placed is not None
        step = play(model, placed.candidate(model))
        assert step.iteration_s == pytest.approx(placed.iteration_s, rel=1e-12)
        assert step.sync_s == pytest.approx(placed.sync_s, rel=1e-9, abs=1e-12 * placed.iteration_s)


@pytest.mark.parametrize("seed", range(10))
def test_releases_by_arrays_are_those_layer_by_layer(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_hybrid_problem(seed)
    try:
        planned = plan(problem, "heuristic", 5.0)
    except (InfeasibleError, UndecidedError):
        return
    monkeypatch.setattr(joint_sums, "MANY_RELEASES", 0)
    assert predict(problem, planned).iteration_s == pytest.approx(planned.predicted.iteration_s, rel=1e-12)


def test_a_plan_of_other_pipelines_than_the_problem_asks_for_is_refused() -> None:
    problem = data_problem((3.0, 2.0, 1.0), rate=40.0, microbatches=12)
    planned = plan(problem)
    with pytest.raises(InputError, match="3 pipelines; the problem asks for one"):
        predict(problem.model_copy(update={"parallel": "pipeline"}), planned)
    unsummed = planned.model_copy(update={"sync": None})
    with pytest.raises(InputError, match="sums nothing"):
        read_candidate(StepCosts(problem), unsummed)
    with pytest.raises(InputError, match="take 12 microbatches, the problem has 24"):
        predict(problem.model_copy(update={"microbatches": 24}), planned)


def test_every_conflict_says_what_to_do() -> None:
    problem = data_problem((3.0, 2.0), rate=40.0, microbatches=12, helpers=("n1/cpu:0",))
    require_consistent(problem)
    for conflict in CONFLICTS:
        words = conflict.words.format(p=problem)
        assert words
        assert "{" not in words
        assert conflict.hint


@pytest.mark.parametrize("parallel", ["data", "hybrid"])
def test_rounds_have_no_order_of_stages(parallel: str) -> None:
    rounds = data_problem((3.0, 2.0), rate=40.0, microbatches=12, rhythm=Rhythm(local_steps=2))
    rounds = rounds.model_copy(update={"parallel": parallel})
    require_consistent(rounds)
    with pytest.raises(InputError, match="schedule 'gpipe' is an order for the stages"):
        require_consistent(rounds.model_copy(update={"schedule": "gpipe"}))
    with pytest.raises(InputError, match="objective 'bottleneck'"):
        require_consistent(rounds.model_copy(update={"objective": "bottleneck"}))
