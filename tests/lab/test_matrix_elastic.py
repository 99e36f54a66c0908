"""Runs whose steps survive lost nodes, over a lab's real SSH: links are cut, and so is the launcher.

Each node writes down a digest of its weights after each update, by itself: so no test goes by what ranks say
of themselves. Nothing may be left on any node.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from skyctl.lab.lab_state import LabState

from ..helpers.processes import after_a_moment, until
from ..helpers.runs import Run, losses_of
from . import harm
from .clusters import Cluster

pytestmark = pytest.mark.matrix

SPEC = {
    "nodes": [{"name": f"n{i}", "cpus": 0.5, "memory_gib": 3, "site": "ab"[i > 2]} for i in range(1, 5)],
    "sites": {"latency_ms": 2},
}
HERE, APART = ("n1", "n2"), ("n3", "n4")
"""The nodes of the two sites; the second site is cut off."""
SITE_APART = 1
STEPS, AT = 60, 12
FORM = ("--parallel", "data", "--sync-format", "fixed32", "--sync", "ring", "--assign", "n1=1,n2=1,n3=1,n4=1")
RUN = ("--steps", str(STEPS), "--json", "--elastic", "--checkpoint-every")
WRITES_DOWN = """

class WritesDown(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        parameters = [one for group in self.param_groups for one in group["params"]]
        if not any(hasattr(one, "fake_mode") or one.device.type != "cpu" for one in parameters):
            digest = hashlib.md5()
            for one in parameters:
                digest.update(one.detach().numpy().tobytes())
            with (Path.home() / "applied").open("a") as file:
                file.write(digest.hexdigest() + "\\n")


def optimizer(parameters):
    return WritesDown(parameters, lr=0.05)
"""


class WrittenDown:
    """The digests that nodes have written down of their updates."""

    def __init__(self, cluster: Cluster) -> None:
        self._files = {node: cluster.home(node) / "applied" for node in cluster.nodes}

    def forget(self) -> None:
        for file in self._files.values():
            file.unlink(missing_ok=True)

    def of(self, node: str) -> list[str]:
        """The digests of that node's weights, update by update."""
        file = self._files[node]
        return file.read_text().split() if file.exists() else []


@pytest.fixture(scope="module")
def shared_cluster(
    shared_lab: Callable[..., LabState], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("elastic")
    cluster = Cluster(shared_lab(SPEC, name="elastic"), folder, sleep_s=0.02)
    train = folder / "train.py"
    train.write_text("import hashlib\n" + train.read_text() + WRITES_DOWN)
    try:
        cluster.plan(*FORM)
        yield cluster
    finally:
        cluster.end()


@pytest.fixture(scope="module")
def undisturbed(shared_cluster: Cluster) -> tuple[list[float], list[str]]:
    """Losses, and what each node writes down, of a run that nothing happens to."""
    written = WrittenDown(shared_cluster)
    written.forget()
    losses = losses_of(shared_cluster.run_inside("launch", "plan.json", *RUN, "0"))
    digests = written.of("n1")
    assert len(digests) >= STEPS
    assert all(written.of(node) == digests for node in shared_cluster.nodes)
    return losses, digests


@pytest.fixture
def losses(undisturbed: tuple[list[float], list[str]]) -> list[float]:
    return undisturbed[0]


@pytest.fixture
def digests(undisturbed: tuple[list[float], list[str]]) -> list[str]:
    return undisturbed[1]


@pytest.fixture
def cluster(shared_cluster: Cluster, losses: list[float]) -> Iterator[Cluster]:
    """A test that fails half-way leaves no run behind."""
    WrittenDown(shared_cluster).forget()
    yield shared_cluster
    shared_cluster.end()


@pytest.fixture
def written(cluster: Cluster) -> WrittenDown:
    return WrittenDown(cluster)


def changes(run: Run) -> list[dict[str, Any]]:
    """The generations on which ranks have said that they agreed, each number once."""
    path = run.folder / "attempts/1/events.jsonl"
    told = [json.loads(line) for line in path.read_text().splitlines()]
    by_number = {one["number"]: one for one in told if one.get("event") == "members" and one["number"]}
    return [by_number[number] for number in sorted(by_number)]


def has_no_rank(cluster: Cluster, *nodes: str) -> bool:
    return after_a_moment(lambda: [pid for node in nodes for pid in harm.ranks(cluster.lab, node)]) == []


def test_a_link_is_cut_and_the_others_end_that_step(
    cluster: Cluster, written: WrittenDown, losses: list[float], digests: list[str]
) -> None:
    run = cluster.launch(*RUN, "5", "--hold", "60").wait_for(AT)
    with harm.black(cluster.lab, "n3"):
        err = run.end().stderr
        assert has_no_rank(cluster, "n3"), "alone it is not more than half, and ends"
    run.is_as(losses, 1)
    assert "rank 2 on n3/cpu:0" in err
    assert [change["members"] for change in changes(run)] == [[0, 1, 3]]
    assert all(written.of(node) == digests for node in ("n1", "n2", "n4"))
    alone = written.of("n3")
    assert alone == digests[: len(alone)]
    assert len(alone) < len(digests)
    assert cluster.settled("n1", "n2", "n4") == {}
    cluster.run("checkpoint", "rm", run.id, "--yes")  # what the lost node still had


def test_of_two_sites_only_the_launchers_goes_on(
    cluster: Cluster, written: WrittenDown, losses: list[float], digests: list[str]
) -> None:
    """The other one waits for the witness, and applies nothing; heard again, it learns that it is out."""
    run = cluster.launch(*RUN, "5").wait_for(AT)
    with harm.site_cut(cluster.lab, SITE_APART):
        run.until(lambda: changes(run))
        (change,) = changes(run)
        run.wait_for(change["step"] + 10)
        applied = {node: written.of(node) for node in APART}
    run.end()
    run.is_as(losses, 1)
    assert change["members"] == [0, 1]
    assert all(written.of(node) == digests for node in HERE)
    before = len(digests) - STEPS  # updates that are tried before the first step
    for node, ones in applied.items():
        assert ones == digests[: len(ones)]
        assert before < len(ones) <= before + change["step"], "no step without the others' votes"
        assert written.of(node) == ones, "nor once it is back"
    assert changes(run) == [change], "one order of generations"
    assert has_no_rank(cluster, *APART)
    assert cluster.settled() == {}


def test_the_launcher_is_killed_and_then_a_rank(
    cluster: Cluster, written: WrittenDown, losses: list[float], digests: list[str]
) -> None:
    """Three of four need no witness: they go on without the launcher, and ``attach`` finds them there."""
    run = cluster.launch(*RUN, "5").wait_for(AT)
    victim = run.rank("n3")
    run.child.kill()
    os.kill(victim, signal.SIGKILL)
    struck = len(written.of("n3"))
    until(lambda: len(written.of("n1")) >= struck + 10, run.told)
    assert changes(run) == [], "the launcher has not heard of it"
    cluster.run("attach", run.id)
    run.is_as(losses, 1)
    assert [change["members"] for change in changes(run)] == [[0, 1, 3]]
    assert all(written.of(node) == digests for node in ("n1", "n2", "n4"))
    assert cluster.settled() == {}
