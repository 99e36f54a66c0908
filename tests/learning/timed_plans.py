"""Plans of each parallelism that are said to take so long."""

from __future__ import annotations

from tests.planner.data_problems import data_problem
from tests.planner.hybrid_plans import hybrid_plan

from skyctl.planner import api
from skyctl.planning.parallelism_choice import with_parallelism
from skyctl.records.interval import Interval
from skyctl.records.plan import Plan

PROBLEM = data_problem(speeds=(2.0, 2.0, 1.0), rate=1e4, microbatches=8, layers=4, parallel="pipeline")


def timed_plan(
    parallelism: str, step_s: float, bound_s: float | None = None, *, strategy: str = "optimal"
) -> Plan:
    """A plan of that parallelism that is said to take so long."""
    plan = (
        hybrid_plan()
        if parallelism == "hybrid"
        else api.plan(with_parallelism(PROBLEM, parallelism), strategy)
    )
    certificate = plan.certificate.model_copy(update={"lower_bound_s": bound_s, "value_s": step_s})
    predicted = plan.predicted.model_copy(update={"iteration_s": step_s})
    return plan.model_copy(update={"certificate": certificate, "predicted": predicted})


def with_interval(plan: Plan, low_s: float, high_s: float) -> Plan:
    """The plan with its predicted step between these, in eight cases of ten."""
    interval = Interval(low_s=low_s, high_s=high_s)
    return plan.model_copy(update={"predicted": plan.predicted.model_copy(update={"interval": interval})})
