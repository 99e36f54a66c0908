"""``launch`` on a cluster that is not what the plan was made for."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest


@pytest.mark.slow
def test_it_refuses_with_a_table_and_goes_on_only_where_told(planned, complains: Callable[..., None]) -> None:
    path = planned.folder / "plan.json"
    document = json.loads(path.read_text())
    assert [machine["device"] for machine in document["machines"]] == ["fast/cpu:0", "slow/cpu:0"]
    for machine in document["machines"]:
        machine["torch"] = "1.0.0"
    document["machines"][1]["cpus"] *= 2
    path.write_text(json.dumps(document))
    done = planned.run_inside("launch", "plan.json", "--json", code=None)
    complains(done, 5, "fast/cpu:0  torch  1.0.0", "slow/cpu:0  torch", "slow/cpu:0  cpus", "-50%")
    error = json.loads(done.stdout)["error"]
    assert len(error["changes"]) == 3
    done = planned.run_inside("launch", "plan.json", "--steps", "5", "--ignore-changes", code=None)
    assert done.returncode == 0, done.stderr
    assert "warning: the cluster is not what the plan was made for" in done.stderr
    unused = ("was disturbed", "not planned with before")  # as where the machine was busier than when probed
    assert any(said in done.stderr for said in ("what this run saw is kept", *unused)), done.stderr
    run = next(line.split()[-1] for line in done.stderr.splitlines() if line.startswith("run: "))
    sizes = ("--batch-size", "8", "--microbatches", "4")
    done = planned.run_inside("plan", "train.py", *sizes, "--strategy", "even", "-v", code=None)
    assert done.returncode == 0, done.stderr
    assert any(said in done.stderr for said in ("as seen in run", *unused)), done.stderr
    done = planned.run_inside("plan", "train.py", "--from-run", run, "--json", "--strategy", "heuristic")
    assert json.loads(done.stdout)["workload"] == document["workload"]
    refused = planned.run_inside("plan", "other.py", "--from-run", run, code=None)
    complains(refused, 2, "trained train.py, not other.py")
