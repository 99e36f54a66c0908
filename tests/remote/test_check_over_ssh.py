"""``check_nodes`` over a real sshd: each fault of the way is a problem of its own, and hides no other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from skyctl.check.check_report import CheckReport
from skyctl.check.preflight import check_nodes
from skyctl.records.cluster import Cluster


def problems(report: CheckReport) -> dict[str, list[str]]:
    return {n.node: [t.name for t in n.ticks if t.status == "failed"] for n in report.nodes}


def test_problems(sshd, tmp_path: Path) -> None:
    sshd.trust()
    other = tmp_path / "other"
    argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(other)]
    subprocess.run(argv, check=True, stdin=subprocess.DEVNULL)
    nodes = (
        sshd.node(name="good", python=sys.executable),
        sshd.node(name="twin", python=sys.executable),
        sshd.node(name="refused", port=1),
        sshd.node(name="stranger", identity_file=str(other)),
        sshd.node(name="nopython", python="/nowhere/python3"),
        sshd.node(name="nokeyfile", identity_file=str(tmp_path / "missing")),
    )
    report = check_nodes(Cluster(name="c", nodes=nodes), sshd.options())
    assert problems(report) == {
        "good": [],
        "twin": [],
        "refused": ["reach"],
        "stranger": ["login"],
        "nopython": ["python"],
        "nokeyfile": ["reach"],
    }
    assert all(t.hint for n in report.nodes for t in n.ticks if t.status == "failed")
    good = report.nodes[0]
    assert [t.name for t in good.ticks][:4] == ["reach", "host key", "login", "python"]
    assert {(p.source, p.target, p.error) for p in report.pairs} == {
        ("good", "twin", None),
        ("twin", "good", None),
    }


@pytest.mark.parametrize("accept", [False, True])
def test_unknown_host_key(sshd, accept: bool) -> None:
    sshd.known_hosts.unlink(missing_ok=True)
    node = sshd.node(name="good", python=sys.executable)
    report = check_nodes(Cluster(name="c", nodes=(node,)), sshd.options(accept_new_host_keys=accept))
    assert problems(report) == {"good": [] if accept else ["host key"]}
