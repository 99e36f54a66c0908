"""Nodes over real SSH, four of them broken, one noisy: the others are profiled, each fault is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from tests.lab import fault_injection

from skyctl.lab.lab_state import LabState

DEAD, HANGING, TORCHLESS, FULL, NOISY = "n02", "n03", "n05", "n06", "n04"
CPUS = 1.92
"""Of all nodes together."""

WORKLOAD = ("gpt:layers=2,hidden=64,heads=4,context=32", "--batch-size", "16", "--microbatches", "8")
QUICKLY = ("--parallel", "pipeline", "--strategy", "heuristic")
PROBE = "skyctl.probe.node.probe_task"


@pytest.mark.slow
@pytest.mark.parametrize("number", [6, pytest.param(16, marks=pytest.mark.matrix)])
def test_four_are_named_and_all_others_profiled(
    lab: Callable[..., LabState], tmp_path: Path, number: int
) -> None:
    names = [f"n{i:02d}" for i in range(1, number + 1)]
    state = lab({"nodes": [{"name": name, "cpus": CPUS / number} for name in names]}, name="broken")
    cluster = broken(state, tmp_path)
    env = {**os.environ, "SKYCTL_HOME": str(tmp_path / "state"), "SKYCTL_CLUSTER": str(cluster)}
    skyctl = [sys.executable, "-m", "skyctl"]
    probe = subprocess.Popen(
        [*skyctl, "probe", *WORKLOAD, "--json"],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        stop_the_probe(state, HANGING, probe)
        out, err = probe.communicate(timeout=400)
    finally:
        probe.kill()
    assert probe.returncode == 4, err
    profile = json.loads(out)
    failures = {failure["node"]: failure["error"] for failure in profile["failures"]}
    assert sorted(failures) == sorted([DEAD, HANGING, TORCHLESS, FULL])
    assert [device["node"] for device in profile["devices"]] == [n for n in names if n not in failures]
    assert {node["quota_period_s"] for node in profile["nodes"]} == {0.01}  # the lab's
    assert "No space left" in failures[FULL]
    assert "no torch" in failures[TORCHLESS]
    assert "said nothing" in failures[HANGING]
    for name, error in failures.items():
        assert name in error
        assert f"{name} was not measured" in err
    well = ",".join(name for name in names if name not in failures)
    plan = tmp_path / "plan.json"
    subprocess.run(
        [*skyctl, "plan", *WORKLOAD, "--limit", well, *QUICKLY, "-o", str(plan)],
        env=env,
        check=True,
        capture_output=True,
    )
    assert set(json.loads(plan.read_text())["stages"][0]["replicas"][0]) >= {"device"}
    nothing_left(state, [name for name in names if name != DEAD])


def broken(state: LabState, folder: Path) -> Path:
    """Breaks four nodes, lets one print a megabyte at each login; the cluster.yaml that goes with that."""
    fault_injection.kill_node(state, DEAD)
    python = state.node(TORCHLESS).python
    done = fault_injection.run_in_node(
        state, TORCHLESS, [python, "-m", "venv", "--without-pip", "/tmp/no-torch"]
    )
    assert done.returncode == 0, done.stderr
    fill = "mkdir /run/full && mount -t tmpfs -o size=64k none /run/full && cat /dev/zero >/run/full/zeros"
    fault_injection.run_in_node(state, FULL, ["sh", "-c", fill])
    noise = "echo 'Welcome!'\nhead -c 1000000 /dev/zero | tr '\\0' x\necho\n"
    done = fault_injection.run_in_node(state, NOISY, ["sh", "-c", f"cat > ~/.bashrc <<'END'\n{noise}END\n"])
    assert done.returncode == 0, done.stderr
    text = yaml.safe_load(state.cluster.read_text())
    for node in text["nodes"]:
        if node["name"] == TORCHLESS:
            node["python"] = "/tmp/no-torch/bin/python"
        elif node["name"] == FULL:
            node["env"] = {"XDG_CACHE_HOME": "/run/full"}
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(text))
    (folder / "known_hosts").write_text(state.known_hosts.read_text())
    return path


def stop_the_probe(state: LabState, name: str, running: subprocess.Popen[str]) -> None:
    """Once that node's probe has something to measure, it is stopped, as a swapped-out one would be."""
    deadline = time.monotonic() + 200
    while running.poll() is None and time.monotonic() < deadline:
        done = fault_injection.run_in_node(state, name, ["pgrep", "-f", PROBE])
        if done.returncode == 0 and busy_s(state, name, done.stdout.split()[0]) > 3.0:
            assert (
                fault_injection.run_in_node(state, name, ["kill", "-STOP", *done.stdout.split()]).returncode
                == 0
            )
            return
        time.sleep(0.5)
    raise AssertionError("its probe never got to measuring")


def busy_s(state: LabState, name: str, pid: str) -> float:
    """CPU seconds so far: importing torch takes about two."""
    fields = (
        fault_injection.run_in_node(state, name, ["cat", f"/proc/{pid}/stat"])
        .stdout.rpartition(")")[2]
        .split()
    )
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def nothing_left(state: LabState, names: list[str]) -> None:
    """No probe, no agent, on any node that is there."""
    deadline = time.monotonic() + 20
    left = dict.fromkeys(names, "?")
    while left and time.monotonic() < deadline:
        outputs = {
            name: fault_injection.run_in_node(state, name, ["pgrep", "-fa", "skyctl[.](agent|probe)"]).stdout
            for name in left
        }
        left = {name: text for name, text in outputs.items() if text.strip()}
        time.sleep(0.2)
    assert not left
