"""``--backend`` of every command, for real: probed, planned, run, compared and summed over it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.commands import run_briefly

NODES = (
    "name: two\nnodes:\n"
    "  - {name: a, transport: local, threads: 1}\n"
    "  - {name: b, transport: local, threads: 1}\n"
)
WORKLOAD = ("gpt:layers=2,hidden=32,heads=2,context=16", "--batch-size", "8", "--microbatches", "4")
Call = Callable[..., tuple[dict[str, Any], str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("backends")


@pytest.fixture(scope="module")
def call(folder: Path) -> Call:
    """``skyctl ARGUMENTS --json`` in ``folder``, a probed cluster of two: (the document, stderr)."""
    (folder / "cluster.yaml").write_text(NODES)

    def run(*words: str) -> tuple[dict[str, Any], str]:
        done = run_briefly(folder, *words, "--json", SKYCTL_HOME=str(folder / "state"))
        assert done.returncode == 0, done.stderr
        document: dict[str, Any] = json.loads(done.stdout)
        return document, " ".join(done.stderr.split())

    run("probe", *WORKLOAD, "--backend", "auto", "-o", str(folder / "profile.json"))
    return run


@pytest.mark.slow
def test_a_probe_measures_gloo_and_auto_has_what_it_needs(call: Call, folder: Path) -> None:
    profile = json.loads((folder / "profile.json").read_text())
    for device in profile["devices"]:
        assert set(device["gloo"]) == {
            "handling_s",
            "handling_byte_s",
            "step_s",
            "message_byte_s",
            "ring_byte_s",
        }
        assert device["gloo"]["handling_s"] > 0
    halves = ("--assign", "a=0:3,b=3:6", "--parallel", "pipeline")
    plan, _ = call("plan", *WORKLOAD, "--backend", "auto", *halves)
    assert (plan["backend"]["backend"], plan["backend"]["reason"]) in [
        ("gloo", "near"),
        ("skyctl", "slower"),
    ]
    assert plan["backend"]["alternative_s"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gloo", pytest.param("skyctl", marks=pytest.mark.matrix)])
def test_a_plan_is_run_over_what_it_was_made_for(call: Call, backend: str) -> None:
    halves = ("--assign", "a=0:3,b=3:6", "--parallel", "pipeline")
    plan, _ = call("plan", *WORKLOAD, "--backend", backend, *halves, "-o", f"{backend}.json")
    assert (plan["backend"]["backend"], plan["backend"]["reason"]) == (backend, "asked")
    done, _ = call("launch", f"{backend}.json", "--steps", "2", "-y")
    assert done["backend"] == backend
    other = {"gloo": "skyctl", "skyctl": "gloo"}[backend]
    done, _ = call("launch", f"{backend}.json", "--steps", "2", "-y", "--backend", other)
    assert done["backend"] == other


@pytest.mark.slow
def test_sums_and_comparisons_go_over_gloo(call: Call) -> None:
    sums, _ = call("bench-sync", "--bytes", "40kB", "--repeat", "1", "--backend", "gloo")
    assert [(row["backend"], row["error"]) for row in sums["rows"]] == [("gloo", None)]
    assert sums["rows"][0]["measured_s"] > 0
    many = ("--strategy", "even,optimal", "--parallel", "pipeline", "--steps", "2")
    compared, _ = call("compare", *WORKLOAD, "--measure", *many, "--backend", "gloo", "-o", "compared")
    assert all(row["error"] is None for row in compared["rows"])
    folder = Path(compared["files"]["report"]).parent if "files" in compared else None
    for name in ("even", "optimal") if folder is not None else ():
        assert json.loads((folder / f"{name}.measurement.json").read_text())["backend"] == "gloo"
