"""Runs that survive, over real SSH: a node goes black in the middle, and the run ends as if it had not."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from datetime import datetime

import pytest

from skyctl.lab.lab_state import LabState

from ..helpers.runs import losses_of
from . import harm
from .clusters import FOUR_NODES, SIZES, Cluster

pytestmark = pytest.mark.matrix

WORKLOAD = "gpt:layers=4,hidden=64,heads=4,context=32"
STEPS = 60
CUT_AT = 12


EVERY = ("--steps", str(STEPS), "--json", "--checkpoint-every", "5")


@pytest.fixture(scope="module")
def cluster(
    shared_lab: Callable[..., LabState], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    cluster = Cluster(shared_lab(FOUR_NODES, name="survival"), tmp_path_factory.mktemp("survival"))
    try:
        yield cluster
    finally:
        cluster.end()


@pytest.fixture(scope="module")
def losses(cluster: Cluster) -> list[float]:
    """Of an undisturbed run on all four nodes."""
    cluster.run_inside("probe", WORKLOAD, *SIZES)
    cluster.run_inside("plan", WORKLOAD, *SIZES, "--strategy", "even", "-o", "plan.json")
    run = cluster.launch(*EVERY)
    losses = losses_of(run.end())
    run.is_as(losses, 1)
    return losses


def test_a_node_goes_black_and_the_run_ends_as_if_it_had_not(cluster: Cluster, losses: list[float]) -> None:
    run = cluster.launch(*EVERY).wait_for(CUT_AT)
    kept = max(run.until(lambda: cluster.whole_without(run, "n3")))  # the newest are not copied yet
    cut_at = time.time()
    with harm.black(cluster.lab, "n3"):
        done = run.end()
    run.is_as(losses, 2)
    used = {replica["device"] for replica in json.loads(done.stdout)["replicas"]}
    assert used <= {"n1/cpu:0", "n2/cpu:0", "n4/cpu:0"}
    assert "node n3 has not been heard for" in done.stderr
    first, second = run.state["attempts"]
    assert second["why"] == "node n3 was lost"
    assert second["from_step"] >= kept
    lasted = re.search(r"the next step came (\S+) s after", done.stderr)
    assert lasted is not None
    ended_s = datetime.fromisoformat(first["ended"]).timestamp() - cut_at
    print(f"lost to the next step: {ended_s:.1f} s until it was given up, {lasted[1]} s more")
    assert cluster.settled("n1", "n2", "n4") == {}
