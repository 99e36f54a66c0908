"""``skyctl setup`` over a real sshd: two nodes at once, a third unreachable; then what was made is used."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest

from skyctl.agent.task_orders import write_order
from skyctl.inventory.environment_registry import with_prepared_environments
from skyctl.jobs.cluster_setup import find_torch_version, make_launcher_id, set_up_cluster
from skyctl.records.cluster import Cluster
from skyctl.remote.session_factory import open_session
from skyctl.setup.fleet import SetupReport
from skyctl.setup.installer import SetupJob
from skyctl.setup.node.setup_events import FoundPython
from skyctl.setup.node.setup_orders import LookOrder
from skyctl.setup.workload_requirements import Requirements

from ..helpers import processes


@pytest.fixture(scope="module")
def wheels() -> ModuleType:
    """The makers of wheels beside setup's own tests."""
    path = Path(__file__).parent.parent / "setup" / "conftest.py"
    spec = importlib.util.spec_from_file_location("setup_wheels", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_over_ssh(sshd, tmp_path: Path, wheels: ModuleType) -> None:
    """The node's home holds blanks, quotes and a dollar sign."""
    wheels.make_torch(tmp_path)
    wheels.make_wheel(tmp_path, "stubdep", "1.0", {"stubdep.py": b""})
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    python = str(bare / "bin/python")
    nodes = (
        sshd.node(name="n1", python=python),
        sshd.node(name="n2", python=python),
        sshd.node(name="n3", port=1),
    )
    cluster = Cluster(name="c", nodes=nodes)
    job = SetupJob(
        cluster="c",
        torch=find_torch_version(),
        requirements=Requirements(),
        here=make_launcher_id(),
        push=True,
    )
    options = sshd.options()
    report = set_up_cluster(cluster, options, job, tmp_path)
    statuses = [node.status for node in report.nodes]
    assert sorted(statuses[:2]) == ["made", "ready"], report
    assert statuses[2] == "failed"
    assert not report.ok
    used = with_prepared_environments(cluster)
    assert used.node("n3") == nodes[2]
    for name in ("n1", "n2"):
        assert used.node(name).python.startswith(str(sshd.home / ".local/share/skyctl/env"))
        with open_session(used.node(name), options) as session:
            look = write_order(LookOrder())
            found = session.run_task("skyctl.setup.node.setup_task", look, 30, answer=FoundPython)
            assert found["python"] == used.node(name).python
    removed = set_up_cluster(Cluster(name="c", nodes=nodes[:2]), options, job, remove=True)
    assert [node.status for node in removed.nodes] == ["removed", "removed"]
    assert not (sshd.home / ".local/share/skyctl").exists()
    assert with_prepared_environments(cluster) == cluster


def test_a_connection_that_is_killed_in_mid_installation(sshd, tmp_path: Path, wheels: ModuleType) -> None:
    """The node is named, nothing half made stays there, and the next setup makes it."""
    wheels.make_torch(tmp_path)
    wheels.make_wheel(tmp_path, "stubdep", "1.0", {"stubdep.py": b""})
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    cluster = Cluster(name="c", nodes=(sshd.node(python=str(bare / "bin/python")),))
    index = wheels.Index(tmp_path)
    job = SetupJob(
        cluster="c",
        torch=find_torch_version(),
        requirements=Requirements(),
        here=make_launcher_id(),
        index_url=index.url,
    )
    environments = sshd.home / ".local/share/skyctl/env"
    try:
        index.go_on.clear()
        reports: list[SetupReport] = []
        command = threading.Thread(
            target=lambda: reports.append(set_up_cluster(cluster, sshd.options(), job))
        )
        command.start()
        assert index.wheel_asked.wait(processes.PATIENCE_S)
        assert list(environments.glob("py*"))
        os.kill(connection_of(sshd.home), signal.SIGKILL)
        command.join(processes.PATIENCE_S)
        (node,) = reports[0].nodes
        assert node.status == "failed"
        assert "n1" in str(node.error)
        assert processes.after_a_moment(environments.exists) is False
        assert with_prepared_environments(cluster) == cluster
        index.go_on.set()
        (node,) = set_up_cluster(cluster, sshd.options(), job).nodes
        assert node.status == "made", node
        assert set_up_cluster(cluster, sshd.options(), job, remove=True).nodes[0].status == "removed"
    finally:
        index.close()


def connection_of(home: Path) -> int:
    """The sshd process of the connection that a node's agent is started over."""
    pid = processes.marked(f"HOME={home}")[0]
    while pid > 1 and not processes.command(pid).startswith("sshd"):
        pid = processes.parent(pid)
    return pid
