"""When ranks get another backend than the one that was chosen for their plan: ours, which goes everywhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress

from skyctl.errors import SkyctlError
from skyctl.planning.backend_choice import choice_at_addresses
from skyctl.records.backend import GLOO, SKYCTL
from skyctl.records.plan import Plan
from skyctl.records.plan_nodes import nodes_in


def backend_at_addresses(plan: Plan, addresses: Callable[[tuple[str, ...]], Mapping[str, str]]) -> Plan:
    """The plan; a backend chosen for private addresses gives way to ours where a node is reached elsewhere.

    So it is looked at before each attempt: a name may lead somewhere else than when it was planned.

    Args:
        addresses: finds out where nodes are reached.
    """
    chosen = plan.backend
    if chosen is None or chosen.is_asked or chosen.backend == SKYCTL:
        return plan
    with suppress(SkyctlError):  # whoever needs them next says what is wrong
        there = addresses(nodes_in(plan))
        backend = choice_at_addresses(chosen, {name: there[name] for name in nodes_in(plan)})
        return plan.model_copy(update={"backend": backend})
    return plan


def without_gloo(plan: Plan) -> Plan:
    """The plan with the backend ``skyctl`` where ``gloo`` had been chosen for it, else the plan as it is.

    For an attempt whose ranks came to no step: not every network suits Gloo.
    """
    chosen = plan.backend
    if chosen is None or chosen.is_asked or chosen.backend != GLOO:
        return plan
    ours = chosen.model_copy(update={"backend": SKYCTL, "reason": "failed", "about": ()})
    return plan.model_copy(update={"backend": ours})
