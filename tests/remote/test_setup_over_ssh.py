"""``skyctl setup`` over a real sshd: two nodes at once, a third unreachable; then what was made is used."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from skyctl.control.setting_up import launcher, set_up, torch_here
from skyctl.inventory.setups import with_setups
from skyctl.records.cluster import Cluster
from skyctl.remote.session import open_session
from skyctl.setup.mending import Job
from skyctl.setup.requirements import Requirements


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
    job = Job(cluster="c", torch=torch_here(), requirements=Requirements(), here=launcher(), push=True)
    options = sshd.options(timeout_s=10)
    report = set_up(cluster, options, job, tmp_path)
    statuses = [node.status for node in report.nodes]
    assert sorted(statuses[:2]) == ["made", "ready"], report
    assert statuses[2] == "failed"
    assert not report.ok
    used = with_setups(cluster)
    assert used.node("n3") == nodes[2]
    for name in ("n1", "n2"):
        assert used.node(name).python.startswith(str(sshd.home / ".local/share/skyctl/env"))
        with open_session(used.node(name), options) as session:
            found = session.call("skyctl.setup.node.serve", {"op": "facts"}, 30)
            assert found["python"] == used.node(name).python
    removed = set_up(Cluster(name="c", nodes=nodes[:2]), options, job, remove=True)
    assert [node.status for node in removed.nodes] == ["removed", "removed"]
    assert not (sshd.home / ".local/share/skyctl").exists()
    assert with_setups(cluster) == cluster
