"""A delay's effects around the planner: parallelisms, what is said of a plan, what is learned from a run."""

from __future__ import annotations

import pytest
from tests.helpers.bare_records import OF_MEASUREMENT
from tests.planner.data_problems import data_problem, delayed
from tests.planner.hybrid_plans import hybrid_plan

from skyctl import plan
from skyctl.compare.sync_summary import describe_sync
from skyctl.compare.timeline import plan_timeline
from skyctl.errors import InputError
from skyctl.learning.observations import correct_from_run
from skyctl.planner.plan_record import pipeline_simulations
from skyctl.planning.parallelism_choice import with_parallelism
from skyctl.planning.plan_creation import parallelisms_left_out
from skyctl.planning.plan_options import PlanOptions
from skyctl.records.measurement import Measurement, Quantiles, StepMeasurement
from skyctl.records.rhythm import Rhythm


def test_one_pipeline_is_left_out_and_has_none() -> None:
    problem = delayed(data_problem(rate=100.0))
    assert "--sync-delay" in parallelisms_left_out(PlanOptions(), problem)["pipeline"]
    assert "--sync-delay" in parallelisms_left_out(PlanOptions(rhythm=Rhythm(delay=1)))["pipeline"]
    assert "pipeline" not in parallelisms_left_out(PlanOptions(rhythm=Rhythm()), problem)
    assert with_parallelism(problem, "pipeline").rhythm.is_synchronous
    assert with_parallelism(problem, "hybrid").rhythm.delay == 1


def test_what_it_takes_and_would_take_without_is_said() -> None:
    planned = plan(delayed(data_problem(rate=100.0, gradient=1400.0)))
    assert describe_sync(planned).endswith(
        "take 28.0 s beside the next step, which waits 4.00 s for them (a delay of one step: changes "
        "training; without it a step of this plan would take 50.0 s)"
    )
    hybrid = hybrid_plan()
    changed = hybrid.model_copy(update={"problem": delayed(hybrid.problem)})
    assert "are summed beside the next step, which waits" in describe_sync(changed)


def test_nothing_is_learned_from_layers_that_sums_slowed() -> None:
    planned = plan(delayed(data_problem(rate=100.0)))
    done = Measurement(
        run_id="r",
        strategy="optimal",
        steps=[StepMeasurement(step=i, loss=1.0, iteration_s=24.0) for i in range(9)],
        iteration_s=Quantiles(median=24.0, p10=24.0, p90=24.0),
        predicted_iteration_s=24.0,
        replicas=[],
        final_loss=1.0,
        attempts=1,
        weights=None,
        **OF_MEASUREMENT,
    )
    with pytest.raises(InputError, match="summed while its layers computed"):
        correct_from_run(planned, done)


def test_each_pipeline_ends_its_drawn_step_with_its_optimizer() -> None:
    planned = plan(delayed(data_problem(rate=100.0, gradient=1400.0)))
    drawn = plan_timeline(planned, pipeline_simulations(planned))
    [step] = drawn.steps
    waits = [span for span in step.spans if span.kind == "R"]
    assert [round(span.end_s - span.start_s, 6) for span in waits] == [4.0, 4.0]
    assert max(span.end_s for span in step.spans) == pytest.approx(28.0)
