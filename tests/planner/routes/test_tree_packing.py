"""Packed trees: known optima, published topologies, brute force, and what is proved."""

import itertools
import math
import random

import numpy as np
import pytest
from tests.planner.route_graphs import (
    DGX_1P,
    DGX_1V,
    LAB_MESH,
    least_byte_s,
    lines,
    mesh,
    random_network,
    sites,
    strength,
)

from skyctl.errors import InputError
from skyctl.planner.routes.arborescence import cheapest_arborescence
from skyctl.planner.routes.quick_trees import ring_trees
from skyctl.planner.routes.route_choice import route_choices, tree_depth
from skyctl.planner.routes.route_network import ResourcePricing, RouteNetwork, RouteShare
from skyctl.planner.routes.steiner_bound import steiner_bound
from skyctl.planner.routes.tree_packing import pack_trees

TWO_SITES = {
    **dict.fromkeys([(0, 1), (0, 2), (1, 2), (3, 4), (3, 5), (4, 5)], 80),
    **dict.fromkeys([(0, 3), (1, 4), (2, 5)], 10),
}
NEVER = math.inf


@pytest.mark.parametrize(
    ("network", "rate"),
    [
        (mesh(4, LAB_MESH), 55),
        (lines([50] * 4 + [250], replicas=4), 50),
        (lines([50] * 4), 100 / 3),
        (mesh(6, TWO_SITES), 30),
        (mesh(8, DGX_1V), 24 / 7),
        (mesh(8, DGX_1P), 16 / 7),
        *((lines([30] * n), 30 * n / (2 * (n - 1))) for n in (2, 3, 7, 12)),
    ],
)
def test_known_optima(network, rate):
    packing = pack_trees(network, NEVER)
    assert 1 / packing.byte_s == pytest.approx(rate, rel=1e-6)
    assert 1 / packing.bound_byte_s == pytest.approx(rate, rel=1e-6)
    assert ResourcePricing(network).busiest_byte_s(packing.routes) == pytest.approx(packing.byte_s)
    assert math.fsum(route.share for route in packing.routes) == pytest.approx(1)


def test_rings_on_the_lab_mesh_are_slower():
    network = mesh(4, LAB_MESH)
    pricing = ResourcePricing(network)
    orders = [(0, *rest) for rest in itertools.permutations((1, 2, 3))]
    one_way = [[RouteShare(1 / 4, tree) for tree in ring_trees(order)] for order in orders]
    both = [[RouteShare(1 / 8, tree) for way in (o, o[::-1]) for tree in ring_trees(way)] for o in orders]
    assert 1 / min(map(pricing.busiest_byte_s, one_way)) == pytest.approx(40 / 3)
    assert 1 / min(map(pricing.busiest_byte_s, both)) == pytest.approx(80 / 3)


def check_against_brute_force(seed, helpers=0):
    network = random_network(seed, helpers)
    packing = pack_trees(network, NEVER)
    best = least_byte_s(network)
    assert packing.byte_s == pytest.approx(best, rel=1e-6, abs=1e-9), seed
    assert packing.bound_byte_s == pytest.approx(best, rel=1e-6, abs=1e-9), seed


@pytest.mark.parametrize("tens", range(6))
def test_random_graphs_equal_brute_force(tens):
    for seed in range(10 * tens, 10 * tens + 10):
        check_against_brute_force(seed)


@pytest.mark.parametrize("helpers", [1, 2])
def test_random_graphs_with_helpers_equal_brute_force(helpers):
    tried = 0
    for seed in range(200):
        if random_network(seed).count in (helpers + 2, helpers + 3, 6):
            tried += 1
            check_against_brute_force(seed, helpers)
    assert tried > 60


@pytest.mark.slow
@pytest.mark.parametrize("tens", range(6, 30))
def test_more_random_graphs_equal_brute_force(tens):
    for seed in range(10 * tens, 10 * tens + 10):
        check_against_brute_force(seed)


@pytest.mark.parametrize("rates", [DGX_1V, DGX_1P], ids=["DGX-1V", "DGX-1P"])
def test_some_of_a_dgxs_devices_reach_the_strength_of_their_links(rates):
    refused = 0
    for size in (3, 4, 5, 6, 7):
        for chosen in itertools.combinations(range(8), size):
            network = mesh(8, rates, chosen)
            place = {d: i for i, d in enumerate(chosen)}
            among = {(place[a], place[b]): r for (a, b), r in rates.items() if {a, b} <= set(chosen)}
            best = strength(size, among)
            if best == 0:
                refused += 1
                with pytest.raises(InputError, match="do not join all"):
                    pack_trees(network, NEVER)
                continue
            packing = pack_trees(network, NEVER)
            assert packing.gap <= 1e-6, chosen
            assert 1 / packing.byte_s == pytest.approx(best, rel=1e-6), chosen
    assert refused > 0


def test_32_devices_in_four_sites_are_packed_within_two_hundredths():
    assert pack_trees(sites(4, 8, 0), NEVER, gap=0.02).gap <= 0.02


def test_many_helpers_keep_the_bound_valid():
    network = lines([50] * 4 + [250] + [1] * 6, replicas=4)  # more helpers than all subsets are looked at of
    packing = pack_trees(network, NEVER)
    assert 1 / packing.byte_s == pytest.approx(50, rel=1e-6)
    assert packing.bound_byte_s <= packing.byte_s
    r = np.random.default_rng(3)
    for _ in range(30):
        costs = r.integers(1, 9, (7, 7)).astype(float)
        best = min(
            cheapest_arborescence(costs[np.ix_(at, at)], 0).cost
            for k in range(4)
            for at in ([0, 1, 2, 3, *more] for more in itertools.combinations((4, 5, 6), k))
        )
        assert 0 < steiner_bound(costs, 0, [1, 2, 3]) <= best + 1e-9


def test_choices_go_from_shallow_to_fast_and_have_few_routes():
    network = mesh(8, DGX_1V)
    packing = pack_trees(network, NEVER)
    choices = list(route_choices(network, packing))
    pricing = ResourcePricing(network)
    seconds = [pricing.busiest_byte_s(routes) for routes in choices]
    depths = [max(tree_depth(route.tree) for route in routes) for routes in choices]
    assert seconds == sorted(seconds, reverse=True)
    assert depths == sorted(depths)
    assert seconds[-1] <= packing.byte_s * 1.02
    assert len(choices[-1]) <= len(packing.routes)
    (*_, best) = route_choices(mesh(4, LAB_MESH), pack_trees(mesh(4, LAB_MESH), NEVER))
    assert len(best) <= 5


def test_one_way_missing_is_refused():
    with pytest.raises(InputError, match="there and back"):
        pack_trees(RouteNetwork(3, (0, 1, 2), {(0, 1): 1.0, (1, 2): 1.0, (2, 1): 1.0}), NEVER)


def test_arborescences_are_the_cheapest():
    r = random.Random(1)
    for _ in range(100):
        n = r.randint(2, 5)
        costs = np.array([[r.choice([math.inf, *range(8)]) for _ in range(n)] for _ in range(n)], dtype=float)
        best = min(
            (
                sum(costs[p, v] for v, p in enumerate(parents, start=1))
                for parents in itertools.product(range(n), repeat=n - 1)
                if all(p != v for v, p in enumerate(parents, start=1)) and joins(parents)
            ),
            default=math.inf,
        )
        arborescence = cheapest_arborescence(costs, 0)
        assert (math.inf if arborescence is None else arborescence.cost) == pytest.approx(best)


def joins(parents):
    def up(v):
        for _ in range(len(parents) + 1):
            if v == 0:
                return True
            v = parents[v - 1]
        return False

    return all(up(v) for v in range(1, len(parents) + 1))
