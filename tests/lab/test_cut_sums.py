"""Links of a mesh that are cut while gradients are summed over trees: losses are those of an undisturbed run.

Ten cuts at moments drawn from a seed, each of the connection between two ranks; a sum takes two fifths of a
step.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from skyctl.lab.lab_state import LabState
from skyctl.records.cluster import node_of

from ..helpers.sockets import cut_connections
from . import fault_injection
from .clusters import SIZES, Cluster

pytestmark = pytest.mark.matrix

NODES = "abcd"
MBIT = {"ab": 40, "bc": 40, "cd": 40, "ad": 5, "ac": 20, "bd": 20}
SPEC = {
    "nodes": [{"name": name, "cpus": 0.4, "memory_gib": 3} for name in NODES],
    "links": [
        {"source": source, "target": target, "rate_mbit": rate}
        for pair, rate in MBIT.items()
        for source, target in (pair, reversed(pair))
    ],
}
WIDTH = 256
"""Of 8 square layers: 2.1 MB of gradients, 0.3 s a step over the mesh."""
SLEEP_S = 0.05
"""Of a layer, for each microbatch: a step alone takes 1.6 s, so new plans have four replicas, too."""
STEPS, EVERY = 85, 5
CUTS, SEED = 10, 23


@pytest.fixture(scope="module")
def cluster(
    shared_lab: Callable[..., LabState], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    cluster = Cluster(
        shared_lab(SPEC, name="cuts"), tmp_path_factory.mktemp("cuts"), sleep_s=SLEEP_S, width=WIDTH
    )
    try:
        cluster.run("probe", "train.py", *SIZES)
        shares = ",".join(f"{name}=1" for name in NODES)
        form = ("--parallel", "data", "--sync", "trees", "--assign", shares)
        cluster.run("plan", "train.py", *SIZES, *form, "-o", "plan.json")
        yield cluster
    finally:
        cluster.end()


@pytest.fixture(scope="module")
def losses(cluster: Cluster) -> list[float]:
    return cluster.losses(STEPS)


@pytest.mark.slow
def test_ten_connections_are_cut_at_random_moments(cluster: Cluster, losses: list[float]) -> None:
    draw, pairs = random.Random(SEED), joined(cluster.folder / "plan.json")
    run = cluster.launch("--steps", str(STEPS), "--json", "--checkpoint-every", str(EVERY))
    for attempt in range(1, CUTS + 1):
        run.more(EVERY + 1)
        time.sleep(draw.uniform(0.0, 0.5))
        here, other = draw.choice(pairs)
        assert cut_connections(run.rank(here), run.rank(other)), (here, other)
        run.begins(attempt + 1)
    err = run.end().stderr
    run.is_as(losses, CUTS + 1)
    assert err.count("the connection to rank") >= CUTS
    assert all("rank" in attempt["why"] for attempt in run.state["attempts"][1:])
    assert cluster.settled() == {}


@pytest.mark.slow
def test_a_link_that_stays_dead_is_planned_around(cluster: Cluster, losses: list[float]) -> None:
    """The same plan is tried once more, but two ranks can't connect; then the same nodes sum another way."""
    here, other = next(pair for pair in joined(cluster.folder / "plan.json") if "a" not in pair)
    run = cluster.launch("--steps", str(STEPS), "--json", "--checkpoint-every", str(EVERY)).more(EVERY + 1)
    make_unreachable(cluster, here, other)
    assert cut_connections(run.rank(here), run.rank(other))
    run.end()
    run.is_as(losses, 3)
    first, second, third = run.state["attempts"]
    assert first["devices"] == second["devices"]
    assert (here, other) not in joined(run.folder / "attempts" / "3" / "plan.json")
    assert {f"{here}/cpu:0", f"{other}/cpu:0"} <= set(third["devices"])
    assert cluster.settled() == {}


def make_unreachable(cluster: Cluster, node: str, other: str) -> None:
    """Neither of the two nodes has a way to the other any more."""
    for here, there in ((node, other), (other, node)):
        gone = ["ip", "route", "replace", "unreachable", f"{cluster.lab.node(there).address}/32"]
        done = fault_injection.run_in_node(cluster.lab, here, gone)
        assert done.returncode == 0, done.stderr


def joined(plan: Path) -> list[tuple[str, str]]:
    """The pairs of nodes that the plan's routes have a connection between."""
    (group,) = json.loads(plan.read_text())["sync"]["groups"]
    edges = [edge for route in group["routes"] for way in ("up", "down") for edge in route[way]]
    return sorted({(min(map(node_of, edge)), max(map(node_of, edge))) for edge in edges})
