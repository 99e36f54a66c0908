"""Whether a plan is for what a run trains: a step of the run keeps its meaning."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tests.planner.data_problems import data_problem

from skyctl.checkpoint.launcher.stored_run import StoredRun
from skyctl.errors import InputError
from skyctl.planner.api import plan
from skyctl.records.plan import Plan, WorkloadRef
from skyctl.records.rhythm import Rhythm
from skyctl.run.change_notes import round_notes
from skyctl.supervision.resume import check_same_training

REF = WorkloadRef(source="train.py", digest="0" * 64, batch_size=8, dtype="float32", seed=0)
ALL = (("n0",), ("n1",), ("n2",))


def made(steps: Any, owners: Any = None, **rhythm: Any) -> Plan:
    problem = data_problem(
        speeds=(2.0, 1.0, 1.0), rate=1e6, rhythm=Rhythm(local_steps=steps, **rhythm), owners=owners
    )
    return plan(problem).model_copy(update={"workload": REF})


def check(known: Plan, given: Plan) -> None:
    state: Any = SimpleNamespace(run_id="r", workload="train.py")
    check_same_training(StoredRun(SimpleNamespace(run_id="r"), state, known), given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("known", "given", "said"),
    [
        ((None,), (4,), "the plan's --local-steps: 4; run r has none"),
        ((4,), (None,), "the plan's --local-steps: none; run r has 4"),
        ((4,), (5,), "the plan's --local-steps: 5; run r has 4"),
        ((4,), ("auto",), "the plan's --local-steps: auto; run r has 4"),
        ((4,), (4, ALL), "the plan's --local-steps: 4 of n0, 4 of n1, 4 of n2; run r has 4,"),
        (((4, 2, 2), ALL), ((2, 3), ALL[1:]), "the plan's --local-steps: 2 of n1, 3 of n2; run r has 2"),
    ],
)
def test_a_plan_whose_steps_are_others_is_refused(known: Any, given: Any, said: str) -> None:
    with pytest.raises(InputError) as found:
        check(made(*known), made(*given))
    assert said in found.value.message
    assert "--init-from r" in (found.value.hint or "")


def test_owners_may_leave_and_come_back() -> None:
    whole, left = made((4, 2, 3), ALL), made((2, 3), ALL[1:], prox_mu=0.1)
    check(whole, left)
    check(left, whole)
    check(made("auto", ALL), made("auto", ALL[:2]))
    check(made(None), made(None, delay=1, undelayed_steps=2))


def test_other_numbers_of_a_rounds_average_are_told() -> None:
    known = made(4, outer_lr=0.7, outer_momentum=0.9)
    other = made(4, outer_lr=0.5, outer_momentum=0.9, prox_mu=0.1)
    check(known, other)
    assert round_notes(known, known) == []
    assert round_notes(known, other) == [
        "rounds go on with --prox-mu 0.1 (it was 0), --outer-lr 0.5 (it was 0.7)"
    ]
    assert round_notes(made(None), other) == [], "refused anyway"
