"""The whole way over real SSH: check, probe, plan, compare --measure, launch, on four unequal machines.

The full-size figures come from ``benchmarks/main_job.py``; this is the same job with a small model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.lab import fault_injection

from skyctl.lab.lab_state import LabState

from ..helpers import runs
from . import harm
from .clusters import FOUR_NODES, Cluster
from .torch_only_venv import make_torch_only_venv

pytestmark = pytest.mark.alone
WORKLOAD = "gpt:layers=4,hidden=192,heads=4,context=64"
SIZES = ("--batch-size", "16", "--microbatches", "8")
STEPS = "6"


@pytest.fixture(scope="module")
def cluster(
    shared_lab: Callable[..., LabState], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("main-job")
    alone = make_torch_only_venv(folder / "torch-alone")
    cluster = Cluster(shared_lab(FOUR_NODES, name="main-job", pythons={"n4": str(alone)}), folder)
    try:
        yield cluster
    finally:
        cluster.end()


@pytest.fixture(scope="module")
def compared(cluster: Cluster) -> Path:
    """Probed, planned, and run under every plan; the folder of the comparison."""
    cluster.run("probe", WORKLOAD, *SIZES)
    out = cluster.folder / "compared"
    pipelines = ("--parallel", "pipeline", "--measure", "--steps", STEPS)
    cluster.run("compare", WORKLOAD, *SIZES, *pipelines, "-o", str(out))
    backends = {backend_of(path) for path in out.glob("*.measurement.json")}
    print(f"the main job ran over {', '.join(sorted(map(str, backends)))}")
    return out


def backend_of(path: Path) -> str | None:
    """The backend that carried tensors in that measurement; None: its plan does not say."""
    backend: str | None = json.loads(path.read_text()).get("backend")
    return backend


def losses(path: Path) -> list[float]:
    return [step["loss"] for step in json.loads(path.read_text())["steps"]]


@pytest.mark.slow
def test_check_finds_every_node_and_pair_well(cluster: Cluster) -> None:
    done = cluster.run("check", "--json")
    assert json.loads(done.stdout)["ok"]


def test_even_is_beaten(compared: Path) -> None:
    rows = {row["strategy"]: row for row in json.loads((compared / "comparison.json").read_text())["rows"]}
    assert set(rows) == {"even", "alone", "heuristic", "optimal"}
    for name in ("heuristic", "optimal"):
        assert rows[name]["predicted_speedup"] > 1.3
        assert rows[name]["measured_speedup"] > 1.3
    assert rows["optimal"]["predicted_s"] <= rows["heuristic"]["predicted_s"] * (1 + 1e-9)
    assert (compared / "comparison.svg").stat().st_size > 10_000


@pytest.mark.slow
def test_losses_are_those_of_one_device(compared: Path) -> None:
    assert [
        replica["device"]
        for replica in json.loads((compared / "alone.measurement.json").read_text())["replicas"]
    ] == ["n1/cpu:0"]
    alone_losses = losses(compared / "alone.measurement.json")
    for strategy in ("even", "heuristic", "optimal"):
        assert losses(compared / f"{strategy}.measurement.json") == pytest.approx(alone_losses, rel=1e-5)


@pytest.mark.slow
def test_an_interrupt_leaves_nothing_on_any_node(cluster: Cluster, compared: Path) -> None:
    run = runs.launch(cluster, str(compared / "even.plan.json"), "--steps", "500").wait_for(1)
    run.child.interrupt()
    run.end(130)
    assert cluster.settled(checkpoints=False) == {}


@pytest.mark.matrix
def test_a_worker_killed_on_its_node_is_named(cluster: Cluster, compared: Path) -> None:
    words = ("--steps", "500", "--max-restarts", "0")
    run = runs.launch(cluster, str(compared / "even.plan.json"), *words).wait_for(1)
    for pid in harm.ranks(cluster.lab, "n3"):
        harm.kill(pid)
    printed = run.end(1).stderr
    assert "on n3/cpu:0" in printed
    assert "SIGKILL" in printed
    assert cluster.settled(checkpoints=False) == {}


def test_a_changed_host_key_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    copy = tmp_path / "lab"
    shutil.copytree(cluster.lab.folder, copy, ignore=lambda folder, names: [n for n in names if n == "nodes"])
    lines = (copy / "known_hosts").read_text().splitlines()
    keys = [line.split(" ", 1) for line in lines]
    swapped = [f"{keys[0][0]} {keys[1][1]}", *lines[1:]]
    (copy / "known_hosts").write_text("\n".join(swapped) + "\n")
    done = cluster.run("probe", "-c", str(copy / "cluster.yaml"), "--limit", "n1", code=4)
    assert "host key" in done.stderr
    assert "changed" in done.stderr


@pytest.mark.matrix  # tests/lab/test_probe_faults.py has one among six
def test_a_node_without_torch_is_named_and_hides_no_other(cluster: Cluster) -> None:
    python = next(node.python for node in cluster.lab.nodes if node.name == "n2")
    venv = fault_injection.run_in_node(
        cluster.lab, "n2", [python, "-m", "venv", "--without-pip", "/tmp/no-torch"]
    )
    assert venv.returncode == 0, venv.stderr
    other = cluster.changed("no-torch", n2={"python": "/tmp/no-torch/bin/python"})
    done = cluster.run("probe", "--json", "-c", str(other), "--limit", "n1,n2", code=4)
    profile = json.loads(done.stdout)
    assert [node["name"] for node in profile["nodes"]] == ["n1"]
    (failure,) = profile["failures"]
    assert failure["node"] == "n2"
    assert "no torch" in failure["error"]
