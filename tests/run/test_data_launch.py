"""``skyctl launch --parallel data`` on two local nodes: what was planned is what runs, and a trace of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.helpers.commands import run_briefly
from tests.worker.workloads import OPTIMIZERS, WORKLOAD

from skyctl.compare.chrome_trace import MEASURED_PID, SIMULATED_PID


@pytest.mark.slow
def test_equal_shares_run_and_are_traced(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WORKLOAD.replace("OPTIMIZER", OPTIMIZERS["adamw"]))
    (tmp_path / "cluster.yaml").write_text(
        "nodes:\n  - {name: a, transport: local, threads: 1}\n  - {name: b, transport: local, threads: 1}\n"
    )
    sized = ("--batch-size", "8", "--microbatches", "3", "--parallel", "data", "--strategy", "even")
    done = run_briefly(tmp_path, "launch", "train.py", *sized, "--steps", "4", "--trace", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["version"] == 7
    assert found["sync_s"] > 0
    assert found["predicted_sync_s"] is not None
    assert [replica["device"] for replica in found["replicas"]] == ["a/cpu:0", "b/cpu:0"]
    slices = [e for e in json.loads(Path(found["trace"]).read_text())["traceEvents"] if e["ph"] == "X"]
    for pid in (MEASURED_PID, SIMULATED_PID):
        own = [e for e in slices if e["pid"] == pid]
        forwards = {(e["tid"], e["args"]["microbatch"]) for e in own if e["name"].startswith("forward")}
        assert forwards == {(1, 0), (1, 1), (2, 2)}
        assert {e["tid"] for e in own if e["name"] == "summing gradients"} == {1, 2}
