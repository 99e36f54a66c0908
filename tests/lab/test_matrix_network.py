"""Faults of the network, of nodes' disks and limits, one row of docs/faults.md each, over a lab's real SSH.

Losses are held against a run that nothing happened to, and nothing may be left on any node.
"""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from tests.lab import fault_injection

from skyctl.inventory.cluster_file import read_cluster
from skyctl.remote.agent_session import Session
from skyctl.remote.base import ConnectOptions
from skyctl.remote.session_factory import open_sessions

from ..helpers.runs import Run
from . import harm
from .clusters import Cluster

pytestmark = pytest.mark.matrix

SPEC = {
    "nodes": [{"name": f"n{i}", "cpus": 0.5, "memory_gib": 3, "site": "ab"[i > 2]} for i in range(1, 5)],
    "sites": {"latency_ms": 2},
}
STEPS = 50
AT = 14
RUN = ("--steps", str(STEPS), "--json")
EVERY = (*RUN, "--checkpoint-every", "5")


@pytest.fixture(scope="module")
def shared_cluster(planned_cluster: Callable[..., Cluster]) -> Cluster:
    return planned_cluster(SPEC, "network", sleep_s=0.02)


@pytest.fixture(scope="module")
def losses(shared_cluster: Cluster) -> list[float]:
    return shared_cluster.losses(STEPS)


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Iterator[Cluster]:
    """A test that fails half-way leaves no run behind."""
    yield shared_cluster
    shared_cluster.end()


# unreachable is not dead


@pytest.mark.slow
@pytest.mark.parametrize("cut_s", [5, 20, 60])
def test_a_node_that_the_launcher_cannot_reach_goes_on(
    cluster: Cluster, losses: list[float], cut_s: float
) -> None:
    """20 s: longer than a node that nobody hears is believed in. 60 s: the run has ended before."""
    run = cluster.launch(*EVERY).wait_for(AT)
    with harm.launcher_cut(cluster.lab, "n2"):
        time.sleep(cut_s)
        assert run.state["status"] == "running"
        assert cut_s < 60 or run.state["away"] == ["n2"]
    run.end()
    run.is_as(losses, 1)
    assert cluster.settled() == {}


@pytest.mark.slow
def test_a_node_that_the_launcher_never_reaches_again(cluster: Cluster, losses: list[float]) -> None:
    """After ``--hold`` both sides give each other up: it ends what runs there, the run goes on without it."""
    run = cluster.launch(*EVERY, "--hold", "60").wait_for(AT)
    with harm.launcher_cut(cluster.lab, "n2"):
        run.end()
        left = cluster.settled(checkpoints=False)
    run.is_as(losses, 2)
    assert run.state["attempts"][1]["why"] == "node n2 was lost"
    assert "n2/cpu:0" not in run.state["attempts"][1]["devices"]
    assert left == {}
    cluster.run("checkpoint", "rm", run.id, "--yes")
    assert cluster.settled() == {}


@pytest.mark.slow
def test_ssh_connections_of_all_nodes_are_killed(cluster: Cluster, losses: list[float]) -> None:
    run = cluster.launch(*EVERY).wait_for(AT)
    for node in cluster.nodes:
        for pid in harm.connections(cluster.lab, node):
            harm.kill(pid)
    run.end()
    run.is_as(losses, 1)
    assert cluster.settled() == {}


@pytest.mark.slow
def test_a_link_that_is_black_for_three_seconds(cluster: Cluster, losses: list[float]) -> None:
    run = cluster.launch(*EVERY).wait_for(AT)
    with harm.black(cluster.lab, "n3"):
        time.sleep(3)
    run.end()
    run.is_as(losses, 1)
    assert cluster.settled() == {}


# nodes that are lost


@pytest.mark.slow
def test_two_nodes_with_two_of_three_copies_end_at_once(cluster: Cluster, losses: list[float]) -> None:
    run = cluster.launch(*EVERY).wait_for(AT)
    gone = ("n2", "n3")
    try:
        for node in gone:
            harm.switch_off(cluster.lab, node)
        run.end()
    finally:
        for node in gone:
            harm.switch_on(cluster.lab, node)
    run.is_as(losses, len(run.state["attempts"]))
    assert set(run.state["attempts"][-1]["devices"]) <= {"n1/cpu:0", "n4/cpu:0"}
    assert cluster.settled("n1", "n4") == {}
    cluster.run("checkpoint", "rm", run.id, "--yes")
    assert [text for node in gone for text in harm.strays(cluster.lab, node).values()] == []


# files of a checkpoint


@pytest.mark.slow
@pytest.mark.parametrize("how", ["truncated", "missing"])
def test_all_copies_of_a_shard_are_damaged(cluster: Cluster, losses: list[float], how: str) -> None:
    """Before a resume: it goes on from the checkpoint before."""
    run = cluster.launch(*EVERY).wait_for(AT)
    run.child.interrupt()
    run.end(130)
    at = run.state["checkpoint"]
    for path in shards(cluster, run, at):
        damage(path, how)
    cluster.run("launch", "--resume", run.id)
    run.is_as(losses, 2)
    assert run.state["attempts"][1]["from_step"] < at
    assert cluster.settled() == {}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["flipped", "missing"])
def test_one_copy_of_a_shard_is_damaged(cluster: Cluster, losses: list[float], how: str) -> None:
    """Before a resume: another node's copy is taken."""
    run = cluster.launch(*RUN, "--checkpoint-every", "20").wait_for(20)
    run.until(lambda: run.state["checkpoint"] == 20 and len(shards(cluster, run, 20)) > 1)
    cluster.run("stop", "--now", run.id)
    run.end(130)
    assert run.state["checkpoint"] == 20
    damage(shards(cluster, run, 20)[0], how)
    cluster.run("launch", "--resume", run.id)
    run.is_as(losses, 2)
    assert run.state["attempts"][1]["from_step"] == 20
    assert cluster.settled() == {}


def shards(cluster: Cluster, run: Run, step: int) -> list[Path]:
    """All copies of one layer of that step, the node's own first."""
    pattern = f".cache/skyctl/runs/{run.id}@*/step-{step:08d}/layer-00002.safetensors"
    paths = [path for node in cluster.nodes for path in cluster.home(node).glob(pattern)]
    return sorted(paths, key=lambda path: not wrote_layer_2(path.parent))


def wrote_layer_2(folder: Path) -> bool:
    """Whether a rank of that node did; else it is a copy."""
    return any("2" in json.loads(part.read_text())["layers"] for part in folder.glob("part-*.json"))


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
    elif how == "truncated":
        path.write_bytes(data[: len(data) // 2])
    else:
        data[-5] ^= 1
        path.write_bytes(data)


# a node's own limits


@pytest.mark.slow
def test_tmp_is_full(cluster: Cluster, losses: list[float]) -> None:
    fill = "mount -t tmpfs -o size=64k none /tmp && cat /dev/zero >/tmp/zeros"
    try:
        assert "No space left" in fault_injection.run_in_node(cluster.lab, "n2", ["sh", "-c", fill]).stderr
        run = cluster.launch(*EVERY)
        run.end()
    finally:
        fault_injection.run_in_node(cluster.lab, "n2", ["umount", "-l", "/tmp"])
    run.is_as(losses, 1)
    assert cluster.settled() == {}


@pytest.mark.slow
def test_few_open_files(cluster: Cluster, losses: list[float]) -> None:
    for pid in harm.listeners(cluster.lab, "n2"):
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (256, 256))
    try:
        checked = cluster.run("check", "-v").stdout
        run = cluster.launch(*EVERY)
        run.end()
    finally:
        harm.stop_sshd(cluster.lab, "n2")  # what was lowered can't be raised again everywhere
        harm.switch_on(cluster.lab, "n2")
    assert "256 open files" in checked
    run.is_as(losses, 1)
    assert cluster.settled() == {}


# many at once


@pytest.mark.slow
def test_64_nodes_through_one_bastion(cluster: Cluster) -> None:
    """sshd as it is delivered: MaxStartups 10:30:100, MaxSessions 10. All are one machine behind another."""
    path = cluster.changed("many")
    text = yaml.safe_load(path.read_text())
    (behind,) = [{**node, "proxy_jump": "n1"} for node in text["nodes"] if node["name"] == "n2"]
    text["nodes"] = [{**behind, "name": f"m{i:02d}"} for i in range(64)]
    path.write_text(yaml.safe_dump(text))
    options = ConnectOptions(ssh_config=str(cluster.lab.ssh_config), timeout_s=60)
    sessions = open_sessions(read_cluster(path).nodes, options)
    try:
        assert [repr(session) for session in sessions.values() if not isinstance(session, Session)] == []
        assert len({session.id for session in sessions.values()}) == 64
    finally:
        for session in sessions.values():
            if isinstance(session, Session):
                session.close()
    assert cluster.settled("n2") == {}
