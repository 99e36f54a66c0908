"""Devices that hold nothing and help to sum: where they pay, what they cost, what is proved and refused."""

import itertools
import json
import random

import pytest
from tests.planner.data_problems import data_problem
from tests.planner.route_graphs import least_byte_s

from skyctl import InfeasibleError, plan, predict, verify
from skyctl.errors import InputError
from skyctl.planner.data.replica_costs import ReplicaCosts
from skyctl.planner.data.tree_layouts import pack_set, route_network
from skyctl.planner.prediction_interval import with_interval
from skyctl.planner.routes.route_names import name_routes
from skyctl.records.base import parse
from skyctl.records.plan import Plan
from skyctl.records.problem import Device, Link, Problem, SharedResource

MBIT = 1e6 / 8
HELPER = "h/cpu:0"
NEVER = 1e300


def with_lines(rates, gradient=1e7, microbatches=400, **more):
    """Four equal devices of 50 ms a microbatch, and a slow one as a helper; each with a line of that rate."""
    problem = data_problem((60.0,) * 4, layers=1, gradient=gradient, microbatches=microbatches)
    ids = [*(device.id for device in problem.devices), HELPER]
    helper = {"id": HELPER, "flops_per_s": 0.01, "memory_bytes": 5e7, **more.pop("helper", {})}
    lines = []
    for name, rate in zip(ids, rates, strict=True):
        for way in (1, -1):
            pairs = [(name, x)[::way] for x in ids if x != name]
            lines.append(SharedResource(name=f"{name} {way}", bandwidth_bytes_per_s=MBIT * rate, links=pairs))
    return problem.model_validate(
        {**dict(problem), "devices": [*problem.devices, Device(**helper)], "shared": lines, **more}
    )


def checked(problem, strategy="optimal"):
    planned = plan(problem, strategy)
    assert predict(problem, planned) == planned.predicted
    verdict = verify(problem, planned)
    assert verdict.ok, verdict
    assert all(check.checked for check in verdict.checks)
    assert parse(Plan, planned.to_json(), "plan.json") == planned
    return planned


def rate_of(planned):
    replicas = {stage.device for stage in planned.placed_stages}
    (own,) = (x for x in planned.certificate.witness.route_prices if set(x.devices) == replicas)
    return 1 / own.byte_s / MBIT


def test_a_fat_line_adds_for_four_equal_ones():
    rates = [50] * 4 + [250]
    planned = checked(with_lines(rates))
    assert planned.helpers == (HELPER,)
    assert planned.predicted.sync_s == pytest.approx(1e7 / (50 * MBIT), rel=1e-3)
    assert rate_of(planned) == pytest.approx(50, rel=1e-6)
    assert planned.certificate.gap < 1e-6
    assert not planned.unused
    assert [x.device for x in planned.predicted.replicas] == [x.device for x in planned.placed_stages]
    ring = checked(with_lines(rates, helpers=()))
    assert ring.helpers == ()
    assert ring.predicted.sync_s == pytest.approx(1e7 / (100 / 3 * MBIT), rel=1e-3)
    assert plan(with_lines(rates, sync="star")).helpers == ()


def test_it_is_used_where_it_was_named_or_saves_a_twentieth():
    rates = [50, 50, 50, 60, 30]
    free, named = with_lines(rates), with_lines(rates, helpers=(HELPER,))
    assert checked(free).helpers == ()
    assert checked(named).helpers == (HELPER,)
    useless = checked(with_lines([50] * 4 + [1], helpers=(HELPER,)))
    (unused,) = useless.unused
    assert (unused.device, "to help" in unused.reason) == (HELPER, True)


def test_a_named_helper_holds_nothing_however_fast_it_is():
    fast = {"flops_per_s": 600.0, "memory_bytes": None}
    planned = checked(with_lines([50] * 4 + [250], helper=fast, helpers=(HELPER,)))
    assert HELPER not in {stage.device for stage in planned.placed_stages}
    assert planned.helpers == (HELPER,)
    assert HELPER in {
        stage.device for stage in checked(with_lines([50] * 4 + [250], helper=fast)).placed_stages
    }
    even = plan(with_lines([50] * 4 + [250], helpers=(HELPER,)), "even")
    assert len(even.pipelines) == 4
    assert verify(even.problem, even).ok
    assert [x.device for x in plan(even.problem, "alone").unused if x.device == HELPER]
    with pytest.raises(InputError, match="holds nothing"):
        plan(even.problem, assign=[(HELPER, 400)])
    with pytest.raises(InfeasibleError, match="every device is to help"):
        plan(data_problem(rate=1.0, helpers=("n0/cpu:0", "n1/cpu:0")))


def test_a_server_is_a_star_whose_root_may_be_a_helper():
    problem = with_lines([50] * 4 + [250], sync="server")
    planned = checked(problem)
    (route,) = planned.sync.groups[0].routes
    assert (route.root, planned.helpers) == (HELPER, (HELPER,))
    assert name_routes(planned.sync.groups[0].routes).kind == "star"
    assert planned.certificate.status == "optimal"
    at_replica = checked(with_lines([250, 50, 50, 50, 50], sync="server"))
    assert at_replica.helpers == ()
    assert at_replica.sync.groups[0].routes[0].root == "n0/cpu:0"
    assert plan(problem, "heuristic").helpers == (HELPER,)


def test_a_ring_and_a_star_have_no_helpers():
    for sync in ("ring", "star"):
        with pytest.raises(InputError, match="joins devices that hold the layers"):
            plan(with_lines([50] * 5, sync=sync, helpers=(HELPER,)))
    with pytest.raises(InputError, match="helpers names device"):
        data_problem(helpers=("n9/cpu:0",))


def test_a_slow_processor_binds_as_a_link_does():
    busy = {"message_byte_s": 1 / (250 * MBIT), "reduce_byte_s": 1 / (250 * MBIT)}
    planned = checked(with_lines([50] * 4 + [1000], helper=busy, helpers=(HELPER,)))
    assert planned.helpers == (HELPER,)
    witness = planned.certificate.witness.route_prices
    assert any(price.device == HELPER for prices in witness for price in prices.processors)
    free = checked(with_lines([50] * 4 + [1000]))
    assert planned.predicted.sync_s > 1.05 * free.predicted.sync_s
    unsure = {"time_uncertainty": 0.1, "overhead_uncertainty": 0.1}
    devices = tuple(device.model_copy(update=unsure) for device in planned.problem.devices)
    problem = planned.problem.model_copy(update={"devices": devices})
    sure = with_interval(plan(problem))
    assert sure.predicted.interval is not None
    assert sure.predicted.interval.high_s > 1.05 * sure.predicted.iteration_s
    assert verify(problem, sure).ok


def test_a_helper_without_room_for_chunks_is_not_taken():
    assert checked(with_lines([50] * 4 + [250], helper={"memory_bytes": 1e6})).helpers == ()


def forged(planned, change):
    raw = json.loads(planned.to_json())
    change(raw)
    verdict = verify(planned.problem, parse(Plan, json.dumps(raw), "plan.json"))
    return {check.name for check in verdict.checks if not check.ok}


def test_forgeries_are_refused():
    busy = {"message_byte_s": 1 / (250 * MBIT), "reduce_byte_s": 1 / (250 * MBIT)}
    planned = checked(with_lines([50] * 4 + [1000], helper=busy, helpers=(HELPER,)))
    witness = planned.certificate.witness.route_prices
    at = next(i for i, prices in enumerate(witness) if len(prices.devices) == 4)
    assert witness[at].processors

    def priced(change):
        return lambda raw: change(raw["certificate"]["witness"]["route_prices"][at])

    assert forged(planned, lambda _: None) == set()
    assert "prices" in forged(planned, priced(lambda prices: prices.update(byte_s=1.1 * prices["byte_s"])))
    assert "prices" in forged(planned, priced(lambda prices: prices["processors"][0].update(price=9.0)))
    assert "prices" in forged(
        planned, priced(lambda prices: prices["processors"][0].update(device="n0/cpu:0"))
    )
    assert "unused" in forged(planned, lambda raw: raw.update(unused=[{"device": HELPER, "reason": "no"}]))

    def with_helpers(problem, helpers):
        other = problem.model_copy(update={"helpers": helpers})
        return {x.name for x in verify(other, planned).checks if not x.ok}

    assert "pipelines" in with_helpers(planned.problem, ())
    assert "pins" in with_helpers(planned.problem, (HELPER, "n0/cpu:0"))

    def idle_leaf(raw):
        route = raw["sync"]["groups"][0]["routes"][0]
        root = route["root"]
        for name, pair in (("up", [HELPER, root]), ("down", [root, HELPER])):
            others = [edge for edge in route[name] if HELPER not in edge]
            joined = {end for edge in others for end in edge}
            assert joined
            route[name] = [*others, pair]

    routes = [{"share": 1.0, "root": "n0/cpu:0", "up": [[f"n{i}/cpu:0", "n0/cpu:0"] for i in (1, 2, 3)],
               "down": [["n0/cpu:0", f"n{i}/cpu:0"] for i in (1, 2, 3)]}]  # fmt: skip

    def star(raw):
        raw["sync"]["groups"][0]["routes"] = json.loads(json.dumps(routes))
        idle_leaf(raw)

    assert "pipelines" in forged(planned, star)


def random_problem(seed):
    """2 or 3 replicas and 1 or 2 devices without memory, on links that differ; processors on some."""
    r = random.Random(seed)
    replicas, helpers = r.choice([(2, 1), (2, 2), (3, 1), (3, 2)])
    ids = [f"n{i}/cpu:0" for i in range(replicas + helpers)]
    pairs = list(itertools.permutations(ids, 2))
    layer = {"name": "x", "flops": 1.0, "state_bytes": 1e8, "activation_bytes": 0.0, "output_bytes": 0.0}
    devices = [
        Device(
            id=name, flops_per_s=10.0, memory_bytes=None if i < replicas else 5e7,
            message_byte_s=r.choice([0.0, 1e-9 * r.uniform(1, 9)]),
            reduce_byte_s=r.choice([0.0, 1e-9 * r.uniform(1, 9)]),
        )
        for i, name in enumerate(ids)
    ]  # fmt: skip
    shared = [
        SharedResource(name=f"s{i}", bandwidth_bytes_per_s=1e7 * r.uniform(1, 9),
                       links=r.sample(pairs, r.randint(2, 5)))
        for i in range(r.choice([0, 1, 2]))
    ]  # fmt: skip
    links = [
        Link(source=a, target=b, latency_s=0.0, bandwidth_bytes_per_s=1e7 * r.uniform(0.5, 9))
        for a, b in pairs
    ]
    return Problem(
        layers=[layer],
        devices=devices,
        links=links,
        shared=shared,
        microbatches=300,
        parallel="data",
        sync="trees",
    )


@pytest.mark.parametrize("tens", range(4))
def test_what_is_proved_of_a_set_equals_brute_force(tens):
    helped = 0
    for seed in range(10 * tens, 10 * tens + 10):
        problem = random_problem(seed)
        model = ReplicaCosts(problem)
        replicas = tuple(d for d in range(len(model.ids)) if model.fitting_cost(d) is not None)
        packed = pack_set(model, replicas, NEVER)
        best = least_byte_s(route_network(model, replicas, model.helpers_of(replicas)))
        assert packed.byte_s == pytest.approx(best, rel=1e-6), seed
        planned = checked(problem)
        helped += bool(planned.helpers)
        assert planned.predicted.iteration_s >= planned.certificate.lower_bound_s * (1 - 1e-9)
    assert helped


@pytest.mark.parametrize("assign", [None, [("n0/cpu:0", 0, 1)]])
def test_one_pipeline_has_nobody_who_only_helps(assign):
    problem = with_lines((50.0,) * 5, helpers=(HELPER,), parallel="pipeline")
    with pytest.raises(InputError, match=f"{HELPER} is to help others to sum gradients") as raised:
        plan(problem, assign=assign)
    assert "--parallel data" in raised.value.hint
