"""A problem for plans of another form."""

from __future__ import annotations

from typing import Any

from skyctl.control.form_choice import STAGE_ORDERS
from skyctl.errors import InfeasibleError
from skyctl.planner.problem_parts import with_devices
from skyctl.records.problem import Parallel, Problem
from skyctl.records.rhythm import Rhythm


def in_form(problem: Problem, parallel: Parallel) -> Problem:
    """The same problem for plans of another form; one of rounds has no other.

    A pipeline's has no devices that are to hold nothing, and no rhythm of sums; that of several pipelines has
    no schedule that only one can have. A parameter server is between devices that hold all layers each, so
    others sum.

    Raises:
        InfeasibleError: for a pipeline, and all devices are to help.
    """
    if problem.rhythm.is_rounds:
        return problem
    if parallel == "pipeline" and problem.helpers:
        left = {device.id for device in problem.devices} - {*problem.helpers}
        if not left:
            raise InfeasibleError(
                "every device is to help, and none is left that may hold the model",
                hint="name fewer helpers (--helper)",
            )
        problem = with_devices(problem, left)
    update: dict[str, Any] = {"parallel": parallel}
    if parallel == "pipeline":
        update["rhythm"] = Rhythm()
    elif problem.schedule in STAGE_ORDERS:
        update["schedule"] = "1f1b"
    if parallel != "data" and problem.rhythm.is_stale:
        update["rhythm"] = Rhythm()
    return problem.model_copy(update=update)
