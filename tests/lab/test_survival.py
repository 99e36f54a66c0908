"""Runs that survive, over real SSH: a node goes black in the middle, and the run ends as if it had not."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from skyctl.lab import inside
from skyctl.lab.state import LabState

pytestmark = pytest.mark.matrix

SPEC = {
    "nodes": [
        {"name": "n1", "cpus": 0.8, "memory_gib": 3, "rate_mbit": 200, "site": "a"},
        {"name": "n2", "cpus": 0.4, "memory_gib": 3, "rate_mbit": 200, "site": "a"},
        {"name": "n3", "cpus": 0.2, "memory_gib": 3, "rate_mbit": 100, "site": "b"},
        {"name": "n4", "cpus": 0.2, "memory_gib": 3, "rate_mbit": 100, "site": "b"},
    ],
    "sites": {"latency_ms": 5},
}
WORKLOAD = "gpt:layers=4,hidden=64,heads=4,context=32"
SIZES = ("--batch-size", "8", "--microbatches", "4")
STEPS = 30
CUT_AT = 12


class Lab:
    """A lab, and skyctl run against it as a user runs it."""

    def __init__(self, state: LabState, folder: Path) -> None:
        self.state = state
        self.folder = folder
        self.env = {
            **os.environ,
            "SKYCTL_HOME": str(folder / "state"),
            "SKYCTL_CLUSTER": str(state.cluster),
            "NO_COLOR": "1",
        }
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *words: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "skyctl", *words]
        pipe = subprocess.PIPE
        child = subprocess.Popen(
            argv,
            env=self.env,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            text=True,
        )
        self.started.append(child)
        return child

    def run(self, *words: str) -> str:
        child = self.start(*words)
        out, err = child.communicate(timeout=400)
        assert child.returncode == 0, err + out
        return out

    def processes(self, node: str) -> list[str]:
        done = inside.run(self.state, node, ["ps", "-eo", "args="])
        lines = [line for line in done.stdout.splitlines() if "skyctl.agent" in line]
        return [line for line in lines if "skyctl.lab" not in line]

    def settle(self, *nodes: str) -> dict[str, list[str]]:
        deadline = time.monotonic() + 20
        while True:
            left = {node: lines for node in nodes if (lines := self.processes(node))}
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.3)

    def end(self) -> None:
        for child in self.started:
            if child.poll() is None:
                child.kill()
            child.communicate()


@pytest.fixture(scope="module")
def cluster(shared_lab: Callable[..., LabState], tmp_path_factory: pytest.TempPathFactory):
    made = Lab(shared_lab(SPEC, name="survival"), tmp_path_factory.mktemp("survival"))
    yield made
    made.end()


@pytest.fixture(scope="module")
def plan(cluster: Lab) -> tuple[str, list[float]]:
    """A plan that uses all four nodes, and the losses of an undisturbed run."""
    cluster.run("probe", WORKLOAD, *SIZES)
    path = str(cluster.folder / "plan.json")
    cluster.run("plan", WORKLOAD, *SIZES, "--strategy", "even", "-o", path)
    done = json.loads(cluster.run("launch", path, "--steps", str(STEPS), "--json", "--checkpoint-every", "5"))
    assert done["attempts"] == 1
    return path, [step["loss"] for step in done["steps"]]


def wait_for_step(cluster: Lab, before: set[Path], step: int) -> Path:
    """Until the run that has been started has done so many steps; its folder."""
    runs = cluster.folder / "state" / "runs"
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        for folder in set(runs.iterdir()) - before:
            metrics = folder / "metrics.jsonl"
            if metrics.is_file() and len(metrics.read_text().splitlines()) >= step:
                return folder
        time.sleep(0.05)
    raise AssertionError(f"no step {step} in time")


def test_a_node_goes_black_and_the_run_ends_as_if_it_had_not(
    cluster: Lab, plan: tuple[str, list[float]]
) -> None:
    path, losses = plan
    before = set((cluster.folder / "state" / "runs").iterdir())
    child = cluster.start("launch", path, "--steps", str(STEPS), "--json", "--checkpoint-every", "5")
    folder = wait_for_step(cluster, before, CUT_AT)
    cut_at = time.time()
    inside.cut_off(cluster.state, "n3")
    try:
        out, err = child.communicate(timeout=300)
    finally:
        inside.rejoin(cluster.state, "n3")
    assert child.returncode == 0, err
    done = json.loads(out)
    assert [step["loss"] for step in done["steps"]] == pytest.approx(losses, rel=1e-5)
    assert [step["step"] for step in done["steps"]] == list(range(STEPS))
    assert done["attempts"] == 2
    assert {replica["device"] for replica in done["replicas"]} <= {"n1/cpu:0", "n2/cpu:0", "n4/cpu:0"}
    assert "node n3 has not been heard for" in err
    state = json.loads((folder / "state.json").read_text())
    first, second = state["attempts"]
    assert second["why"] == "node n3 was lost"
    assert second["from_step"] in (
        5,
        10,
    )  # two quick steps after it was written, the newest may not be copied
    assert state["status"] == "done"
    lasted = re.search(r"the next step came (\S+) s after", err)
    assert lasted is not None
    from datetime import datetime

    ended = datetime.fromisoformat(first["ended"]).timestamp()
    print(f"lost to the next step: {ended - cut_at:.1f} s until it was given up, {lasted[1]} s more")
    assert cluster.settle("n1", "n2", "n4") == {}
