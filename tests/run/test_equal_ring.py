"""Which sums are left to the backend's own collective: equal shares of a ring, and nothing else."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from tests.attack.rank_forms import DEVICES, make_plan

from skyctl.records.plan import Plan
from skyctl.run.sum_spec import equal_ring


def routed(order: str, shares: list[float] | None = None, **sync: Any) -> Plan:
    """A data plan whose routes go round in that order of its nodes, the first one's share first."""
    made = json.loads(make_plan("data").to_json())
    ring = [f"{name}/cpu:0" for name in order]
    routes = []
    for at, root in enumerate(ring):
        path = [*ring[at + 1 :], *ring[: at + 1]]
        down = [root, *path[:-1]]
        share = (shares or [1 / len(ring)] * len(ring))[at]
        ways = {"up": list(itertools.pairwise(path)), "down": list(itertools.pairwise(down))}
        routes.append({"share": share, "root": root, **ways})
    made["sync"]["groups"][0]["routes"] = routes
    made["sync"] |= sync
    return Plan.model_validate(made)


@pytest.mark.parametrize("order", ["abcd", "acbd", "adcb", "bdac"])
def test_ranks_stand_as_the_ring_goes(order: str) -> None:
    found = equal_ring(routed(order))
    assert found is not None
    assert found[0] == 0
    turned = order[order.index("a") :] + order[: order.index("a")]
    assert "".join(DEVICES[rank][0] for rank in found) == turned


@pytest.mark.parametrize("form", ["pipeline", "hybrid", "delay", "rounds", "staleness", "helper"])
def test_other_forms_and_rhythms_keep_their_routes(form: str) -> None:
    assert equal_ring(make_plan(form)) is None


def test_other_routes_shares_and_formats_keep_theirs() -> None:
    assert equal_ring(routed("abcd", [0.4, 0.2, 0.2, 0.2])) is None
    assert equal_ring(routed("abcd", format="bfloat16")) is None
    made = json.loads(routed("abcd").to_json())
    routes = made["sync"]["groups"][0]["routes"]
    a, b, c, d = DEVICES
    routes[0] |= {"up": [[b, a], [c, a], [d, a]], "down": [[a, b], [a, c], [a, d]]}
    assert equal_ring(Plan.model_validate(made)) is None
