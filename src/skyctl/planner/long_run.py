"""What a step without staleness takes in the long run, where devices' steps are as uneven as was seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from skyctl.planner.data.scaled_steps import TimeFactors
from skyctl.planner.data.stale_plan import CLOCKS, drawn_factors
from skyctl.planner.drawn_steps import drawn_ratios
from skyctl.records.plan import Plan
from skyctl.records.problem import Device

DRAWN_PIPELINES = 400
"""Steps that are drawn where each has to be simulated."""


def long_run_step_s(plan: Plan, factors: Mapping[str, Sequence[float]]) -> float:
    """Seconds of a plan's step, or round, on average, as a plan with a parameter server predicts them.

    Each step waits for the slowest of all. A device's factors are drawn as for the play of a parameter
    server's plan, and multiply all that it computes in a step.

    Args:
        plan: of any rhythm; with a parameter server its prediction is of the long run already.
        factors: by device, its ``step_factors``; a device that is left out has even steps.

    Raises:
        InputError: see ``api.predict``.
    """
    step_s = plan.predicted.iteration_s
    known = {stage.device: tuple(factors.get(stage.device, ())) for stage in plan.placed_stages}
    if plan.predicted.stale is not None or step_s <= 0 or not any(known.values()):
        return step_s
    draws = CLOCKS if plan.problem.parallel == "data" else DRAWN_PIPELINES

    def drawn(device: Device) -> Sequence[float]:
        own = known.get(device.id, ())
        return drawn_factors(device.model_copy(update={"step_factors": own}), draws)

    even = (1.0,) * draws
    return step_s * fmean(drawn_ratios(plan, TimeFactors(drawn, drawn, lambda _link: even), draws))
