"""``skyctl check`` on real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.helpers.commands import run_inside

from skyctl.check.check_report import CheckReport
from skyctl.check.preflight import check_nodes
from skyctl.records.cluster import Cluster, Node
from skyctl.remote.base import ConnectOptions


def local(name: str, **more) -> Node:
    return Node(name=name, transport="local", **{"python": sys.executable, **more})


def check(*nodes: Node) -> CheckReport:
    return check_nodes(Cluster(name="c", nodes=nodes), ConnectOptions(timeout_s=5))


def problems(report: CheckReport) -> dict[str, list[str]]:
    return {n.node: [t.name for t in n.ticks if t.status == "failed"] for n in report.nodes}


@pytest.fixture
def bare_python(tmp_path: Path) -> str:
    """A Python that has no torch."""
    folder = tmp_path / "a venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return str(folder / "bin" / "python")


def test_all_well() -> None:
    progress: list[tuple[str, float, float]] = []
    nodes = (local("two words"), local("b"), local("'; echo foo"))
    report = check_nodes(
        Cluster(name="c", nodes=nodes), ConnectOptions(), lambda *what: progress.append(what)
    )
    assert report.ok, report
    assert (report.problems, report.cluster) == (0, "c")
    assert [n.node for n in report.nodes] == ["two words", "b", "'; echo foo"]
    assert {n.address for n in report.nodes} == {"127.0.0.1"}
    names = ["reach", "python", "torch", "devices", "address", "port", "limits", "clock"]
    assert list(dict.fromkeys(t.name for t in report.nodes[0].ticks)) == names
    assert len({(p.source, p.target) for p in report.pairs}) == 6
    assert [done for _, done, _ in progress] == list(range(13))
    assert {total for _, _, total in progress} == {12}


def test_every_fault_is_a_cross_and_hides_no_other(bare_python: str) -> None:
    report = check(
        local("good"),
        local("nopython", python="/nowhere/python3"),
        local("notorch", python=bare_python),
        local("nodevice", devices=("cuda:77",)),
        local("nointerface", interface="nope0"),
    )
    assert not report.ok
    assert problems(report) == {
        "good": [],
        "nopython": ["python"],
        "notorch": ["torch"],
        "nodevice": ["devices"],
        "nointerface": ["address"],
    }
    hints = [t.hint for n in report.nodes for t in n.ticks if t.status == "failed"]
    assert all(hints)
    # who has an address meets the others all the same
    met = {(p.source, p.target) for p in report.pairs if p.error is None}
    assert met >= {("good", "notorch"), ("nodevice", "good"), ("nointerface", "good")}
    assert not any(p.target == "nointerface" for p in report.pairs)


def test_an_unreachable_node_beside_a_good_one() -> None:
    report = check(local("good"), Node(name="off", host="127.0.0.1", port=1))
    assert problems(report) == {"good": [], "off": ["reach"]}
    assert [t.status for t in report.nodes[1].ticks].count("skipped") == 9


def test_command(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(
        "defaults: {transport: local}\nnodes:\n  - a\n  - {name: b, interface: nope0}\n"
    )
    done = run_inside(tmp_path, "check")
    assert done.returncode == 4
    assert "✓ 1 node: a\n" in done.stdout
    assert "  ✗ address   node 'b' has no interface 'nope0'" in done.stdout
    assert "      next: correct `interface` of node 'b' in cluster.yaml" in done.stdout
    assert done.stdout.endswith("1 problem\n")
    assert "Traceback" not in done.stderr

    well = run_inside(tmp_path, "check", "--limit", "a")
    assert well.returncode == 0, well.stderr
    assert len(well.stdout.splitlines()) <= 5
    assert "all well: 1 node (-v lists every check)" in well.stdout
    assert "✓ a  127.0.0.1\n" in run_inside(tmp_path, "check", "--limit", "a", "-v").stdout

    done = run_inside(tmp_path, "check", "--limit", "a", "--json", "-q")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["ok"] is True
    assert [node["node"] for node in document["nodes"]] == ["a"]


def test_command_with_bad_input(tmp_path: Path) -> None:
    done = run_inside(tmp_path, "check")
    assert done.returncode == 2
    assert "skyctl init" in done.stderr
    (tmp_path / "cluster.yaml").write_text("nodes:\n  - {name: a, prot: 1}\n")
    done = run_inside(tmp_path, "check")
    assert (done.returncode, done.stdout) == (2, "")
    assert "cluster.yaml:2: unknown key 'prot' in node 'a'; did you mean 'port'?" in done.stderr
    (tmp_path / "cluster.yaml").write_text("nodes: [a]\n")
    done = run_inside(tmp_path, "check", "--limit", "b")
    assert done.returncode == 2
    assert "(nodes: a)" in done.stderr
    assert run_inside(tmp_path, "check", "--dry-run").stdout == "would check a, and every pair of them\n"
