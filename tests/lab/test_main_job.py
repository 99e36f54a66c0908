"""The whole way over real SSH: check, probe, plan, compare --measure, launch, on four unequal machines.

The full-size figures come from ``benchmarks/main_job.py``; this is the same job with a small model.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from skyctl.lab import inside
from skyctl.lab.state import LabState
from skyctl.lab.venv import make_torch_only_venv

SPEC = {
    "nodes": [
        {"name": "n1", "cpus": 0.8, "memory_gib": 3, "rate_mbit": 200, "site": "a"},
        {"name": "n2", "cpus": 0.4, "memory_gib": 3, "rate_mbit": 200, "site": "a"},
        {"name": "n3", "cpus": 0.2, "memory_gib": 3, "rate_mbit": 100, "site": "b"},
        {"name": "n4", "cpus": 0.2, "memory_gib": 3, "rate_mbit": 100, "site": "b"},
    ],
    "sites": {"latency_ms": 5},
}
WORKLOAD = "gpt:layers=4,hidden=192,heads=4,context=64"
SIZES = ("--batch-size", "16", "--microbatches", "8")
STEPS = "6"


class Cluster:
    """A lab, and skyctl run against it as a user runs it."""

    def __init__(self, state: LabState, folder: Path) -> None:
        self.state = state
        self.folder = folder
        self.env = {
            **os.environ,
            "SKYCTL_HOME": str(folder / "state"),
            "SKYCTL_CLUSTER": str(state.cluster),
        }

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "skyctl", *words],
            env=self.env,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        child = self.start(*words)
        out, err = child.communicate(timeout=400)
        assert child.returncode == code, err + out
        return subprocess.CompletedProcess(words, child.returncode, out, err)

    def processes(self) -> dict[str, list[str]]:
        """By node, what runs there beside sshd and init."""
        found = {}
        for node in self.state.nodes:
            done = inside.run(self.state, node.name, ["ps", "-eo", "args="])
            lines = [line for line in done.stdout.splitlines() if "skyctl.agent" in line or "python" in line]
            found[node.name] = [line for line in lines if "skyctl.lab" not in line]
        return {name: lines for name, lines in found.items() if lines}

    def settle(self) -> dict[str, list[str]]:
        """As ``processes``, once what is ending has had a moment."""
        deadline = time.monotonic() + 15
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return left


@pytest.fixture(scope="module")
def cluster(shared_lab: Callable[..., LabState], tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    folder = tmp_path_factory.mktemp("main-job")
    alone = make_torch_only_venv(folder / "torch-alone")
    state = shared_lab(SPEC, name="main-job", pythons={"n4": str(alone)})
    return Cluster(state, folder)


@pytest.fixture(scope="module")
def compared(cluster: Cluster) -> Path:
    """Probed, planned, and run under every plan; the folder of the comparison."""
    cluster.run("probe", WORKLOAD, *SIZES)
    out = cluster.folder / "compared"
    cluster.run("compare", WORKLOAD, *SIZES, "--measure", "--steps", STEPS, "-o", str(out))
    return out


def losses(path: Path) -> list[float]:
    return [step["loss"] for step in json.loads(path.read_text())["steps"]]


def test_check_finds_every_node_and_pair_well(cluster: Cluster) -> None:
    done = cluster.run("check", "--json")
    assert json.loads(done.stdout)["ok"]


def test_even_is_beaten(compared: Path) -> None:
    rows = {row["strategy"]: row for row in json.loads((compared / "comparison.json").read_text())["rows"]}
    assert set(rows) == {"even", "heuristic", "optimal"}
    for name in ("heuristic", "optimal"):
        assert rows[name]["predicted_speedup"] > 1.3
        assert rows[name]["measured_speedup"] > 1.3
    assert rows["optimal"]["predicted_s"] <= rows["heuristic"]["predicted_s"] * (1 + 1e-9)
    assert (compared / "comparison.png").stat().st_size > 10_000


def test_losses_are_those_of_one_device(cluster: Cluster, compared: Path) -> None:
    layers = json.loads((compared / "even.plan.json").read_text())["stages"][-1]["stop"]
    plan, measured = cluster.folder / "one.plan.json", cluster.folder / "one.json"
    cluster.run("plan", WORKLOAD, *SIZES, "--assign", f"n1=0:{layers}", "-o", str(plan))
    cluster.run("launch", str(plan), "--steps", STEPS, "-o", str(measured))
    one = losses(measured)
    for strategy in ("even", "heuristic", "optimal"):
        assert losses(compared / f"{strategy}.measurement.json") == pytest.approx(one, rel=1e-5)


def test_an_interrupt_leaves_nothing_on_any_node(cluster: Cluster, compared: Path) -> None:
    child = cluster.start("launch", str(compared / "even.plan.json"), "--steps", "500")
    assert child.stderr is not None
    for line in child.stderr:
        if re.search(r"step \d+", line):
            break
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 130, err
    assert cluster.settle() == {}


def test_a_worker_killed_on_its_node_is_named(cluster: Cluster, compared: Path) -> None:
    child = cluster.start("launch", str(compared / "even.plan.json"), "--steps", "500", "--max-restarts", "0")
    assert child.stderr is not None
    for line in child.stderr:
        if re.search(r"step \d+", line):
            break
    done = inside.run(cluster.state, "n3", ["pkill", "-KILL", "-f", "skyctl.worker.rank"])
    assert done.returncode == 0
    _, err = child.communicate(timeout=60)
    assert child.returncode == 1, err
    assert "on n3/cpu:0" in err
    assert "SIGKILL" in err
    assert "Traceback" not in err
    assert cluster.settle() == {}


def test_a_changed_host_key_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    from shutil import copytree

    copy = tmp_path / "lab"
    copytree(cluster.state.folder, copy, ignore=lambda folder, names: [n for n in names if n == "nodes"])
    lines = (copy / "known_hosts").read_text().splitlines()
    keys = [line.split(" ", 1) for line in lines]
    swapped = [f"{keys[0][0]} {keys[1][1]}", *lines[1:]]
    (copy / "known_hosts").write_text("\n".join(swapped) + "\n")
    done = cluster.run("probe", "-c", str(copy / "cluster.yaml"), "--limit", "n1", code=4)
    assert "host key" in done.stderr
    assert "changed" in done.stderr


def test_a_node_without_torch_is_named_and_hides_no_other(cluster: Cluster, tmp_path: Path) -> None:
    python = next(node.python for node in cluster.state.nodes if node.name == "n2")
    made = inside.run(cluster.state, "n2", [python, "-m", "venv", "--without-pip", "/tmp/no-torch"])
    assert made.returncode == 0, made.stderr
    text = cluster.state.cluster.read_text()
    assert text.count(f"python: {python}") >= 2
    blocks = text.split("- name: ")
    blocks = [
        b.replace(f"python: {python}", "python: /tmp/no-torch/bin/python") if b.startswith("n2") else b
        for b in blocks
    ]
    (tmp_path / "cluster.yaml").write_text("- name: ".join(blocks))
    (tmp_path / "known_hosts").write_text(cluster.state.known_hosts.read_text())
    done = cluster.run("probe", "--json", "-c", str(tmp_path / "cluster.yaml"), "--limit", "n1,n2", code=4)
    profile = json.loads(done.stdout)
    assert [node["name"] for node in profile["nodes"]] == ["n1"]
    (failure,) = profile["failures"]
    assert failure["node"] == "n2"
    assert "no torch" in failure["error"]
