"""What a step without staleness takes in the long run, where devices' steps are as uneven as was seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from skyctl.planner.data.scaled_steps import TimeFactors, scaled_steps_s
from skyctl.planner.data.stale_plan import CLOCKS, drawn_factors
from skyctl.records.plan import Plan
from skyctl.records.problem import Device


def long_run_step_s(plan: Plan, factors: Mapping[str, Sequence[float]]) -> float:
    """Seconds of a plan's step on average, comparable with what a plan with a parameter server predicts.

    Each step waits for the slowest of all, and the draws are those that a parameter server's plan is played
    with. As predicted, without that, for stages of which several are in a row: how uneven steps add up along
    a pipeline is not modelled.

    Args:
        plan: of any rhythm; with a parameter server its prediction is of the long run already.
        factors: by device, its ``step_factors``; a device that is left out has even steps.

    Raises:
        InputError: see ``api.predict``.
    """
    step_s = plan.predicted.iteration_s
    stages = plan.placed_stages
    if plan.predicted.stale is not None or not any(factors.get(stage.device) for stage in stages):
        return step_s
    if len(stages) == 1:
        return step_s * fmean(factors[stages[0].device])
    if plan.problem.parallel != "data":
        return step_s

    def drawn(device: Device) -> Sequence[float]:
        known = tuple(factors.get(device.id, ()))
        return drawn_factors(device.model_copy(update={"step_factors": known}), CLOCKS)

    even = (1.0,) * CLOCKS
    return fmean(scaled_steps_s(plan, TimeFactors(drawn, drawn, lambda _link: even), CLOCKS))
