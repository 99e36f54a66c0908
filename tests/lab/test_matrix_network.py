"""Faults of the network, of nodes' disks and limits, one row of docs/faults.md each, over a lab's real SSH.

Losses are held against a run that nothing happened to, and nothing may be left on any node.
"""

from __future__ import annotations

import json
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from skyctl.inventory.read import read_cluster
from skyctl.lab import inside
from skyctl.lab.state import LabState
from skyctl.remote.base import ConnectOptions
from skyctl.remote.session import Session, open_sessions

from . import faulty
from .faulty import Cluster, Run

pytestmark = pytest.mark.matrix

SPEC = {
    "nodes": [{"name": f"n{i}", "cpus": 0.5, "memory_gib": 3, "site": "ab"[i > 2]} for i in range(1, 5)],
    "sites": {"latency_ms": 2},
}
STEPS = 50
AT = 14
EVERY = ("--checkpoint-every", "5")


@pytest.fixture(scope="module")
def cluster(
    shared_lab: Callable[..., LabState], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    made = Cluster(shared_lab(SPEC, name="network"), tmp_path_factory.mktemp("network"), sleep_s=0.02)
    try:
        made.plan()
        yield made
    finally:
        made.end()


@pytest.fixture(scope="module")
def losses(cluster: Cluster) -> list[float]:
    return cluster.losses(STEPS)


@pytest.fixture(autouse=True)
def _ends(cluster: Cluster) -> Iterator[None]:
    """A test that fails half-way leaves no run behind."""
    yield
    cluster.end()


def as_ever(cluster: Cluster, run: Run, losses: list[float], attempts: int) -> str:
    """It ends well, as if nothing had happened; what it said."""
    done, err = run.end()
    assert [step["step"] for step in done["steps"]] == list(range(STEPS))
    assert [step["loss"] for step in done["steps"]] == pytest.approx(losses, rel=1e-5)
    assert done["attempts"] == attempts, err
    return err


# unreachable is not dead


@pytest.mark.slow
@pytest.mark.parametrize("cut_s", [5, 20])
def test_a_node_that_the_launcher_cannot_reach_goes_on(
    cluster: Cluster, losses: list[float], cut_s: float
) -> None:
    """20 s: longer than a node that nobody hears is believed in."""
    run = cluster.launch(STEPS, *EVERY).wait_for(AT)
    inside.cut_launcher(cluster.lab, "n2")
    try:
        time.sleep(cut_s)
    finally:
        inside.rejoin(cluster.lab, "n2")
    as_ever(cluster, run, losses, 1)
    assert faulty.left(cluster) == {}


@pytest.mark.slow
def test_ssh_connections_of_all_nodes_are_killed(cluster: Cluster, losses: list[float]) -> None:
    run = cluster.launch(STEPS, *EVERY).wait_for(AT)
    for node in cluster.lab.nodes:
        for pid in faulty.connections(cluster.lab, node.name):
            faulty.kill(pid)
    as_ever(cluster, run, losses, 1)
    assert faulty.left(cluster) == {}


@pytest.mark.slow
def test_a_link_that_is_black_for_three_seconds(cluster: Cluster, losses: list[float]) -> None:
    run = cluster.launch(STEPS, *EVERY).wait_for(AT)
    with faulty.black(cluster.lab, "n3"):
        time.sleep(3)
    as_ever(cluster, run, losses, 1)
    assert faulty.left(cluster) == {}


# nodes that are lost


@pytest.mark.slow
def test_two_nodes_with_two_of_three_copies_end_at_once(cluster: Cluster, losses: list[float]) -> None:
    run = cluster.launch(STEPS, *EVERY).wait_for(AT)
    gone = ("n2", "n3")
    try:
        for node in gone:
            faulty.switch_off(cluster.lab, node)
        done, _ = run.end()
    finally:
        for node in gone:
            faulty.switch_on(cluster.lab, node)
    assert [step["loss"] for step in done["steps"]] == pytest.approx(losses, rel=1e-5)
    assert {replica["device"] for replica in done["replicas"]} <= {"n1/cpu:0", "n4/cpu:0"}
    assert faulty.left(cluster, "n1", "n4") == {}
    cluster.run("checkpoint", "rm", run.folder.name, "--yes")
    assert [p for n in gone for p in faulty.strays(cluster.lab, n).values()] == []


# files of a checkpoint


@pytest.mark.slow
@pytest.mark.parametrize("how", ["truncated", "missing"])
def test_all_copies_of_a_shard_are_damaged(cluster: Cluster, losses: list[float], how: str) -> None:
    """Before a resume: it goes on from the checkpoint before."""
    run = cluster.launch(STEPS, *EVERY).wait_for(AT)
    run.child.send_signal(signal.SIGINT)
    run.end(130)
    at = run.state["checkpoint"]
    for path in shards(cluster, run, at):
        damage(path, how)
    resumed(cluster, run, losses)
    assert run.state["attempts"][1]["from_step"] < at


@pytest.mark.slow
@pytest.mark.parametrize("how", ["flipped", "missing"])
def test_one_copy_of_a_shard_is_damaged(cluster: Cluster, losses: list[float], how: str) -> None:
    """Before a resume: another node's copy is taken."""
    run = cluster.launch(STEPS, "--checkpoint-every", "20").wait_for(20)
    run.until(lambda: len(shards(cluster, run, 20)) > 1)
    cluster.run("stop", "--now", run.folder.name)
    run.child.wait(faulty.PATIENCE_S)
    assert run.state["checkpoint"] == 20
    damage(shards(cluster, run, 20)[0], how)
    resumed(cluster, run, losses)
    assert run.state["attempts"][1]["from_step"] == 20


def resumed(cluster: Cluster, run: Run, losses: list[float]) -> None:
    out, _ = cluster.run("launch", "--resume", run.folder.name, "--json")
    assert [step["loss"] for step in json.loads(out)["steps"]] == pytest.approx(losses, rel=1e-5)
    assert faulty.left(cluster) == {}


def shards(cluster: Cluster, run: Run, step: int) -> list[Path]:
    """All copies of one layer of that step, the node's own first."""
    pattern = f"home/.cache/skyctl/runs/{run.folder.name}@*/step-{step:08d}/layer-00002.safetensors"
    found = [path for node in cluster.lab.nodes for path in cluster.lab.node_folder(node.name).glob(pattern)]
    return sorted(found, key=lambda path: not list(path.parent.glob("part-*.json")))


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
    assert "No space left" in inside.run(cluster.lab, "n2", ["sh", "-c", fill]).stderr
    try:
        as_ever(cluster, cluster.launch(STEPS, *EVERY), losses, 1)
    finally:
        inside.run(cluster.lab, "n2", ["umount", "-l", "/tmp"])
    assert faulty.left(cluster) == {}


@pytest.mark.slow
def test_few_open_files(cluster: Cluster, losses: list[float]) -> None:
    (listener,) = faulty.listeners(cluster.lab, "n2")
    resource.prlimit(listener, resource.RLIMIT_NOFILE, (256, 256))
    try:
        checked, _ = cluster.run("check")
        as_ever(cluster, cluster.launch(STEPS, *EVERY), losses, 1)
    finally:
        faulty.kill(listener)  # what was lowered can't be raised again everywhere
        faulty.switch_on(cluster.lab, "n2")
    assert "256 open files" in checked
    assert faulty.left(cluster) == {}


# many at once


@pytest.mark.slow
def test_64_nodes_through_one_bastion(cluster: Cluster) -> None:
    """sshd as it is delivered: MaxStartups 10:30:100, MaxSessions 10. All are one machine behind another."""
    text = yaml.safe_load(cluster.lab.cluster.read_text())
    known = {node["name"]: node for node in text["nodes"]}
    behind = {**known["n2"], "proxy_jump": "n1"}
    text["nodes"] = [{**behind, "name": f"m{i:02d}"} for i in range(64)]
    path = cluster.folder / "many.yaml"
    path.write_text(yaml.safe_dump(text))
    (cluster.folder / "known_hosts").write_text(cluster.lab.known_hosts.read_text())
    options = ConnectOptions(ssh_config=str(cluster.lab.ssh_config), timeout_s=60)
    found = open_sessions(read_cluster(path).nodes, options)
    try:
        assert [repr(one) for one in found.values() if not isinstance(one, Session)] == []
        assert len({one.id for one in found.values()}) == 64
    finally:
        for one in found.values():
            if isinstance(one, Session):
                one.close()
    assert faulty.left(cluster, "n2") == {}
