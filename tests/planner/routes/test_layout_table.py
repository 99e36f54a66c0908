"""The rings and stars of any replicas: which order of a ring is the best, and what a byte takes on each."""

from __future__ import annotations

from itertools import pairwise

import pytest

from skyctl import plan, verify
from skyctl.planner.routes.layout_table import MOST_ORDERED, LayoutTable
from skyctl.planner.sum_costs import SumCosts
from skyctl.records.problem import Device, Layer, Link, Problem, SharedResource

MBIT = 1.25e5


def mesh(rates_mbit, count, **more):
    """Devices with a line both ways between each two of them; rates by pair, in order."""
    ids = [f"n{i}/cpu:0" for i in range(count)]
    pairs = [(a, b) for a in range(count) for b in range(a + 1, count)]
    links = [
        Link(source=ids[x], target=ids[y], bandwidth_bytes_per_s=rate * MBIT, latency_s=0.001)
        for (a, b), rate in zip(pairs, rates_mbit, strict=True)
        for x, y in ((a, b), (b, a))
    ]
    layer = Layer(name="all", flops=1e9, state_bytes=4e7, activation_bytes=1.0, output_bytes=1.0)
    devices = [Device(id=name, flops_per_s=1e9, memory_bytes=None) for name in ids]
    return Problem(
        layers=[layer], devices=devices, links=links, microbatches=count, parallel="data", **more
    )  # fmt: skip


def test_on_a_mesh_the_ring_leaves_out_the_slow_line():
    problem = mesh((40, 40, 40, 5, 20, 20), 4, sync="ring")
    planned = plan(problem.model_copy(update={"microbatches": 400}))
    assert planned.certificate.status == "optimal"
    assert len(planned.pipelines) == 4
    used = {pair for route in planned.sync.groups[0].routes for pair in route.up}
    assert not {("n1/cpu:0", "n2/cpu:0"), ("n2/cpu:0", "n1/cpu:0")} & used
    assert verify(planned.problem, planned).ok
    # 10 MB of gradients, 3/4 of them twice over lines of 20 Mbit/s, next to 6 hops
    assert planned.predicted.sync_s == pytest.approx(1.5 * 1e7 / (20 * MBIT) + 0.006, rel=1e-3)


def test_as_fast_a_ring_keeps_the_problems_order():
    terms = LayoutTable(SumCosts(mesh((40,) * 10, 5))).terms((0, 1, 2, 3, 4))
    assert [layout.ring for layout in terms.layouts if layout.root is None] == [()]
    assert terms.least_ring is None


def test_a_ring_of_many_replicas_crosses_between_two_sites_twice():
    """Devices of two sites take turns in the problem: its own order would cross at every hop."""
    count = MOST_ORDERED + 5
    problem = mesh([100.0] * (count * (count - 1) // 2), count)
    ids = [device.id for device in problem.devices]
    crossing = [(a, b) for a in ids[::2] for b in ids[1::2]]
    sites = [
        SharedResource(name=name, bandwidth_bytes_per_s=20 * MBIT, links=pairs)
        for name, pairs in (("there", crossing), ("back", [(b, a) for a, b in crossing]))
    ]
    costs = SumCosts(problem.model_copy(update={"shared": tuple(sites)}))
    terms = LayoutTable(costs).terms(tuple(range(count)))
    (ring,) = (layout.ring for layout in terms.layouts if layout.root is None)
    assert sum(a % 2 != b % 2 for a, b in pairwise((*ring, ring[0]))) == 2
    assert terms.byte_s[0] == pytest.approx(2 * (count - 1) / count / (20 * MBIT))
