"""A plan's bounds of the parallelisms it was chosen among are proved again by ``verify``, or refused."""

import pytest
from tests.planner.hybrid_problems import random_hybrid_problem

from skyctl import plan, verify
from skyctl.planning.parallelism_choice import choose_parallelism


@pytest.fixture(scope="module")
def chosen():
    problem = random_hybrid_problem(4, devices=(4, 4), layers=(4, 4), microbatches=(4, 4))
    return choose_parallelism(
        lambda parallelism, s: plan(problem.model_copy(update={"parallel": parallelism}), time_limit_s=s),
        {},
        20,
    )


def checks_of(planned):
    return {
        check.name: check
        for check in verify(planned.problem, planned).checks
        if check.name.startswith("form ")
    }


def test_bounds_of_all_parallelisms_are_proved_again(chosen):
    checks = checks_of(chosen)
    assert list(checks) == ["form pipeline", "form data", "form hybrid"]
    assert all(check.ok for check in checks.values()), checks
    assert all(outcome.lower_bound_s is not None for outcome in chosen.forms)
    assert any(check.checked for check in checks.values())


@pytest.mark.parametrize("parallelism", ["pipeline", "data", "hybrid"])
def test_a_bound_above_what_was_found_is_refused(chosen, parallelism):
    forged = [
        outcome.model_copy(update={"lower_bound_s": outcome.iteration_s * 1.01})
        if outcome.parallel == parallelism
        else outcome
        for outcome in chosen.forms
    ]
    forged_plan = chosen.model_copy(update={"forms": tuple(forged)})
    checks = checks_of(forged_plan)
    assert not checks[f"form {parallelism}"].ok
    assert not verify(forged_plan.problem, forged_plan).ok


def test_a_bound_that_is_too_high_is_not_taken_for_proved_where_the_step_is_forged_as_well(chosen):
    forged = [
        outcome.model_copy(
            update={"lower_bound_s": outcome.iteration_s * 1.5, "iteration_s": outcome.iteration_s * 2}
        )
        if outcome.parallel != chosen.problem.parallel
        else outcome
        for outcome in chosen.forms
    ]
    checks = checks_of(chosen.model_copy(update={"forms": tuple(forged)}))
    others = [check for name, check in checks.items() if name != f"form {chosen.problem.parallel}"]
    assert len(others) == 2
    assert not any(check.ok and check.checked for check in others), others


def test_the_plans_own_parallelism_says_its_own_step(chosen):
    forged = [
        outcome.model_copy(update={"iteration_s": outcome.iteration_s * 2})
        if outcome.parallel == chosen.problem.parallel
        else outcome
        for outcome in chosen.forms
    ]
    assert not checks_of(chosen.model_copy(update={"forms": tuple(forged)}))[
        f"form {chosen.problem.parallel}"
    ].ok
