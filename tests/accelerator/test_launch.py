"""``skyctl`` on nodes with the toy accelerator: checked, probed, planned and launched as any other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skyctl.device.node_environment import CONTEXT_BYTES

NODES = (
    "name: two\nnodes:\n"
    "  - {name: a, transport: local, threads: 1, devices: ['toy:0']}\n"
    "  - {name: b, transport: local, threads: 1, devices: ['toy:1']}\n"
)
WORKLOAD = ("gpt:layers=2,hidden=32,heads=2,context=16", "--batch-size", "8", "--microbatches", "4")
Call = Callable[..., dict[str, Any]]


@pytest.fixture
def call(tmp_path: Path, toy: None) -> Call:
    """``skyctl COMMAND --json ARGUMENTS`` in a cluster of two: the document."""
    (tmp_path / "cluster.yaml").write_text(NODES)

    def run(*words: str) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-m", "skyctl", words[0], "--json", *words[1:]],
            cwd=tmp_path,
            env={**os.environ, "SKYCTL_HOME": str(tmp_path / "state")},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    return run


def test_a_node_that_nobody_knows_is_asked_for_its_accelerators(call: Call, tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(
        "name: two\nnodes:\n"
        "  - {name: a, transport: local}\n"
        "  - {name: b, transport: local, devices: ['toy:1']}\n"
    )
    done = call("run", "--per-node", "gpu", "--", "true")
    assert [one["node"] for one in done["ranks"]] == ["a", "a", "b"]


@pytest.mark.matrix
def test_nodes_with_toys_are_checked_probed_planned_and_trained_on(call: Call) -> None:
    assert "toy accelerator 1" in json.dumps(call("check"))
    profile = call("probe", *WORKLOAD)
    assert [one["id"] for one in profile["devices"]] == ["a/toy:0", "b/toy:1"]
    assert {one["reserved_bytes"] for one in profile["devices"]} == {CONTEXT_BYTES}
    losses = []
    for parallel, shares in (("pipeline", "a=0:3,b=3:6"), ("data", "a=1,b=3")):
        plan = call("plan", *WORKLOAD, "--parallel", parallel, "--assign", shares, "-o", "plan.json")
        assert plan["backend"]["backend"] == "skyctl"
        done = call("launch", "plan.json", "--steps", "3", "-y")
        losses.append([step["loss"] for step in done["steps"]])
    assert len(losses[0]) == 3
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
