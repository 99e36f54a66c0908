"""Data plans over packed trees: when they are taken, what is proved and refused, what they are called."""

import itertools
import json

import pytest
from tests.planner.data_problems import data_problem
from tests.planner.route_graphs import LAB_MESH

from skyctl import plan, predict, verify
from skyctl.errors import InputError, RecordError
from skyctl.planner.routes.route_names import name_routes
from skyctl.records.base import parse
from skyctl.records.plan import Plan
from skyctl.records.problem import Link, Problem
from skyctl.records.sync import Route

MBIT = 1e6 / 8


def lab_mesh(gradient=1e7, latency=0.0, microbatches=400, **more):
    """Four equal devices, 50 ms a microbatch, on the mesh of 40, 40, 40, 5, 20 and 20 Mbit/s."""
    problem = data_problem(
        (60.0,) * 4, rate=1.0, layers=1, gradient=gradient, microbatches=microbatches, **more
    )
    links = [
        Link(
            source=f"n{a}/cpu:0", target=f"n{b}/cpu:0", latency_s=latency,
            bandwidth_bytes_per_s=MBIT * (LAB_MESH.get((a, b)) or LAB_MESH[b, a]),
        )
        for a, b in itertools.permutations(range(4), 2)
    ]  # fmt: skip
    return problem.model_copy(update={"links": tuple(links)})


def test_trees_are_taken_where_rings_and_stars_leave_links_idle():
    problem = lab_mesh()
    planned = plan(problem)
    routes = planned.sync.groups[0].routes
    assert name_routes(routes).kind == "trees"
    assert len(routes) <= 9
    assert 1e7 / (55 * MBIT) < planned.predicted.sync_s < 1.05 * 1e7 / (55 * MBIT)
    assert plan(problem.model_copy(update={"sync": "ring"})).predicted.sync_s > 1.9
    (own,) = (x for x in planned.certificate.witness.route_prices if len(x.devices) == 4)
    assert own.byte_s == pytest.approx(1 / (55 * MBIT))
    assert planned.certificate.gap < 0.01
    verdict = verify(problem, planned)
    assert verdict.ok
    assert all(check.checked for check in verdict.checks)
    assert predict(problem, planned) == planned.predicted
    assert plan(problem.model_copy(update={"sync": "trees"})).predicted.sync_s == planned.predicted.sync_s


def test_deep_trees_with_a_tiny_gain_lose_to_latency():
    kinds = [name_routes(plan(lab_mesh(g, 0.05)).sync.groups[0].routes).kind for g in (1e4, 1e7)]
    assert kinds[0] in ("star", "stars")
    assert kinds[1] == "trees"
    even = plan(lab_mesh(), "even")
    assert name_routes(even.sync.groups[0].routes).kind == "ring"


def test_a_users_own_shares_are_summed_over_the_fastest_routes():
    shares = [(f"n{i}/cpu:0", 100) for i in range(4)]
    planned = plan(lab_mesh(), assign=shares)
    assert name_routes(planned.sync.groups[0].routes).kind == "trees"
    ring = plan(lab_mesh().model_copy(update={"sync": "ring"}), assign=shares)
    assert name_routes(ring.sync.groups[0].routes).kind == "ring"
    assert ring.predicted.sync_s > planned.predicted.sync_s


def test_a_plan_over_trees_is_read_again():
    planned = plan(lab_mesh())
    assert parse(Plan, planned.to_json(), "plan.json") == planned
    with pytest.raises(InputError, match="sync"):
        Problem.model_validate({**dict(lab_mesh()), "sync": "tree"})


def forged(planned, change):
    raw = json.loads(planned.to_json())
    change(raw["certificate"])
    verdict = verify(planned.problem, parse(Plan, json.dumps(raw), "plan.json"))
    return {check.name for check in verdict.checks if not check.ok}


def test_forged_prices_are_refused():
    planned = plan(lab_mesh())
    priced = json.loads(planned.to_json())["certificate"]["witness"]["route_prices"]
    own = next(i for i, price in enumerate(priced) if len(price["devices"]) == 4)

    def prices(proof):
        return proof["witness"]["route_prices"]

    assert forged(planned, lambda _: None) == set()
    assert "prices" in forged(planned, lambda proof: prices(proof)[own].update(byte_s=1 / (50 * MBIT)))
    assert "prices" in forged(planned, lambda proof: prices(proof)[own]["links"][0].update(price=9.0))
    assert "prices" in forged(planned, lambda proof: prices(proof)[own].update(links=[]))
    assert "prices" in forged(planned, lambda proof: prices(proof)[own]["devices"].__setitem__(0, "n9/cpu:0"))

    def higher(proof):
        proof["lower_bound_s"] = proof["value_s"]
        proof.update(gap=0.0, status="optimal")

    assert forged(planned, higher) == {"bound"}  # nobody has a faster plan, and nothing shows that nobody has
    with pytest.raises(RecordError, match="twice"):
        forged(planned, lambda proof: prices(proof).append(prices(proof)[own]))
    with pytest.raises(RecordError, match="has none"):
        forged(planned, lambda proof: proof["witness"].update(route_prices=[], layer_prices=[]))


def routes_of(*routes):
    return [Route(share=share, root=root, up=list(up), down=list(down)) for share, root, up, down in routes]


def chain(order):
    return [list(pair) for pair in itertools.pairwise(order)]


def test_what_routes_are_called():
    def ring(order, share):
        turned = [order[i:] + order[:i] for i in range(len(order))]
        return [(share, at[0], chain(at[1:] + at[:1]), chain(at)) for at in turned]

    star = (1.0, "b", [["a", "b"], ["c", "b"]], [["b", "a"], ["b", "c"]])
    one_way, both = ring("abc", 1 / 3), [*ring("abc", 1 / 6), *ring("acb", 1 / 6)]
    for routes, kind, devices in (
        ([star], "star", ("b",)),
        (one_way, "ring", ("a", "b", "c")),
        (both, "two-way ring", None),
        ([(0.5, *star[1:]), (0.5, "a", [["b", "a"], ["c", "a"]], [["a", "b"], ["a", "c"]])], "stars", None),
        ([(1.0, "a", [["c", "b"], ["b", "a"]], [["a", "b"], ["b", "c"]])], "tree", ("a",)),
        ([(0.6, *one_way[0][1:]), (0.4, *star[1:])], "trees", ("a",)),
        ([(0.5, *one_way[0][1:]), *((0.25, *x[1:]) for x in one_way[1:])], "trees", ("a",)),
    ):
        name = name_routes(routes_of(*routes))
        assert name.kind == kind
        assert devices is None or name.devices == devices
