"""``skyctl launch`` of plans whose gradients go over a node that holds no layers, and only sums."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.commands import run_briefly
from tests.worker.test_resume import BATCH_NORM
from tests.worker.workloads import OPTIMIZERS, WORKLOAD

A, B, C = "a/cpu:0", "b/cpu:0", "c/cpu:0"
SIZED = ("--batch-size", "8", "--microbatches", "3", "--parallel", "data")
ROUTES = [
    {"share": 0.4, "root": C, "up": [[A, C], [B, C]], "down": [[C, A], [C, B]]},
    {"share": 0.3, "root": A, "up": [[B, C], [C, A]], "down": [[A, B]]},
    {"share": 0.1, "root": B, "up": [[A, B]], "down": [[B, C], [C, A]]},
    {"share": 0.2, "root": A, "up": [[B, A]], "down": [[A, B]]},
]
"""The helper is a root, passes on upwards alone, downwards alone, and is left out."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Probed and planned for once."""
    folder = tmp_path_factory.mktemp("helped")
    source = WORKLOAD.replace("OPTIMIZER", OPTIMIZERS["adamw"])
    assert BATCH_NORM[0] in source
    source = source.replace(BATCH_NORM[0], "nn.BatchNorm1d(5), nn.GELU(), Head()")
    held_out = (
        "\n\ndef validation(batch_size, seed):\n    return itertools.islice(data(batch_size, seed), 2)\n"
    )
    (folder / "train.py").write_text(f"import itertools\n{source}{held_out}")
    nodes = "".join(f"  - {{name: {name}, transport: local, threads: 1}}\n" for name in "abc")
    (folder / "cluster.yaml").write_text(f"nodes:\n{nodes}")
    return folder


def run(folder: Path, *words: str) -> Any:
    done = run_briefly(folder, *words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def plan_over(folder: Path, routes: list[dict[str, Any]], name: str, sums_as: str = "float32") -> str:
    """A plan of two holders with these routes."""
    path = folder / "plan.json"
    if not path.exists():
        run(folder, "probe", "train.py", *SIZED[:4], "--links", "none")
        run(folder, "plan", "train.py", *SIZED, "--assign", "a=2,b=1", "--helper", "c", "-o", str(path))
    made = json.loads(path.read_text())
    assert made["problem"]["helpers"] == [C]
    made["sync"]["groups"][0]["routes"] = routes
    made["sync"]["format"] = made["problem"]["sync_format"] = sums_as
    made["unused"] = [one for one in made["unused"] if one["device"] != C]
    (folder / name).write_text(json.dumps(made))
    return name


@pytest.mark.slow
@pytest.mark.parametrize("sums_as", ["float32", "fixed32"])
def test_losses_are_those_of_the_same_run_without_a_helper(cluster: Path, sums_as: str) -> None:
    more = ("--steps", "6", "--checkpoint-every", "2", "--validate-every", "3", "--validate-batches", "1")
    helped = run(cluster, "launch", plan_over(cluster, ROUTES, "helped.json", sums_as), *more, "--trace")
    star = [{"share": 1.0, "root": A, "up": [[B, A]], "down": [[A, B]]}]
    plain = run(cluster, "launch", plan_over(cluster, star, "plain.json", sums_as), *more)
    assert [one["loss"] for one in helped["steps"]] == [one["loss"] for one in plain["steps"]]
    assert helped["validation"] == plain["validation"]
    assert [one["device"] for one in helped["replicas"]] == [A, B]
    events = json.loads(Path(helped["trace"]).read_text())["traceEvents"]
    assert {e["tid"] for e in events if e["ph"] == "X" and e["name"] == "summing gradients"} == {1, 2}
    told = run(cluster, "launch", "helped.json", "--dry-run", "--steps", "6")["ranks"][2]
    assert told["device"] == C
    assert not {"workload", "recipe", "weights"} & told["payload"].keys()
