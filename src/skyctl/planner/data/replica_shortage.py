"""Why devices can't hold all layers: which lacks how many bytes, and whether a pipeline would fit instead."""

from __future__ import annotations

import time
from typing import NoReturn

from skyctl.errors import InfeasibleError, UndecidedError
from skyctl.planner.cost_model import CostModel
from skyctl.planner.data.replica_costs import ReplicaCosts
from skyctl.planner.heuristic.heuristic_plan import heuristic_placement
from skyctl.planner.routes.route_layouts import Layout
from skyctl.planner.stage_memory import human_bytes
from skyctl.records.problem import Problem

PIPELINE_S = 2.0
"""Time to find a pipeline that fits."""
MOST_NAMED = 3
"""Devices that a message names, at most."""
OTHER_STRATEGY = "--strategy heuristic or optimal leaves devices out"


def pipeline_fits(problem: Problem) -> bool:
    """Whether a pipeline over the same devices was found that fits in their memory."""
    model = CostModel(problem.model_copy(update={"parallel": "pipeline"}))
    try:
        heuristic_placement(model, deadline=time.perf_counter() + PIPELINE_S)
    except (InfeasibleError, UndecidedError):
        return False
    return True


def _hint(model: ReplicaCosts, other: str | None = None) -> str | None:
    hints = [other] if other is not None else []
    if pipeline_fits(model.problem):
        hints.append("a pipeline fits: --parallel pipeline")
    return "; or ".join(hints) or None


def shortage_words(model: ReplicaCosts, device: int, children: int = 0) -> str:
    """The memory that a device needs to hold all layers, what it has, and how much it is short, in words."""
    need, has = model.least_bytes(device, children), model.problem.devices[device].memory_bytes
    assert has is not None
    return (
        f"{model.ids[device]} needs {human_bytes(need)} and has {human_bytes(has)} "
        f"({human_bytes(need - has)} short)"
    )


def raise_no_replica(model: ReplicaCosts) -> NoReturn:
    """Raises InfeasibleError where no device can hold all layers: pins, or who lacks least memory."""
    devices = range(len(model.ids))
    allowed = [d for d in devices if model.may_hold[d]]
    if not allowed and set(model.problem.helpers or ()) == set(model.ids):
        raise InfeasibleError(
            "every device is to help, and none is left that may hold the model",
            hint="name fewer helpers (--helper)",
        )
    if not allowed:
        raise InfeasibleError(
            "no device may hold both the first and the last layer, and so none the whole model",
            hint=_hint(model, "allow one device both: --pin-first and --pin-last"),
        )

    def short_bytes(d: int) -> float:
        return model.least_bytes(d) - (model.problem.devices[d].memory_bytes or 0.0)

    nearest = sorted(allowed, key=lambda d: (short_bytes(d), d))
    words = ", ".join(shortage_words(model, d) for d in nearest[:MOST_NAMED])
    more = f", and {len(nearest) - MOST_NAMED} more lack more" if len(nearest) > MOST_NAMED else ""
    which = "no device" if len(allowed) == len(model.ids) else "no device that the pins allow"
    raise InfeasibleError(f"{which} can hold the whole model: {words}{more}", hint=_hint(model))


def raise_if_short(model: ReplicaCosts, layout: Layout, what: str) -> NoReturn:
    """Raises InfeasibleError for the first replica of a layout that may not or can't hold all layers.

    ``what``: how the message calls the plan, which is known not to fit.
    """
    children = layout.children()
    for d in layout.replicas:
        if not model.may_hold[d]:
            raise InfeasibleError(
                f"{what}: {model.ids[d]} would hold the whole model, and a pin keeps it from the first or "
                "the last layer",
                hint=_hint(model, OTHER_STRATEGY),
            )
        if model.fitting_cost(d, children.get(d, 0)) is None:
            raise InfeasibleError(
                f"{what}: the whole model does not fit: {shortage_words(model, d, children.get(d, 0))}",
                hint=_hint(model, OTHER_STRATEGY),
            )
    raise AssertionError("every replica has the memory")


def raise_too_few_microbatches(model: ReplicaCosts, count: int) -> NoReturn:
    """Raises InfeasibleError where equal shares would leave one of ``count`` devices without a microbatch."""
    raise InfeasibleError(
        f"equal shares for {count} devices need {count} microbatches a step, it has {model.microbatches}",
        hint=f"--microbatches {count} or more (the batch can be cut into as many as it has samples); or "
        f"{OTHER_STRATEGY}",
    )
