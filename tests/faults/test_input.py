"""The first wrong thing a user types: the contract's exit code, one clear message, nothing left behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ..helpers.commands import Done, run_here
from .conftest import Here

PROBLEM = {
    "kind": "skyctl/problem",
    "version": 1,
    "layers": [
        {"name": f"l{i}", "flops": 1e9, "state_bytes": 1e9, "activation_bytes": 1e6, "output_bytes": 1e5}
        for i in range(4)
    ],
    "devices": [{"id": f"n{i}/cpu:0", "flops_per_s": 1e10, "memory_bytes": 2.5e9} for i in range(2)],
    "microbatches": 4,
}


@pytest.fixture
def here(here: Here, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    """The same, with its commands run in this process: none of them starts anything that lasts."""

    def run(*words: str) -> Done:
        return run_here(capsys, *words)

    monkeypatch.chdir(here.folder)
    monkeypatch.setenv("SKYCTL_HOME", str(here.state))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(here, "run", run)
    return here


def test_no_cluster_file(here, complains: Callable[..., None]) -> None:
    (here.folder / "cluster.yaml").unlink()
    complains(here.run("probe", "train.py"), 2, "cluster.yaml does not exist", "skyctl init")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nodes:\n  - {name: a, prot: 22}\n", (":2:", "'prot'", "'port'")),
        ("nodes:\n  - a\n  - b\n  - a\n", (":4:", "duplicate node 'a'")),
        ("nodes:\n  - {name: a, port: 99999}\n", (":2:", "port", "65535")),
        ("nodes:\n\t- a\n", (":2:", "tab")),
    ],
)
def test_a_fault_in_cluster_yaml_names_its_line(
    here, complains: Callable[..., None], text: str, words: tuple[str, ...]
) -> None:
    (here.folder / "cluster.yaml").write_text(text)
    complains(here.run("check"), 2, "cluster.yaml", *words)


def test_an_unreadable_key_file(here, complains: Callable[..., None]) -> None:
    (here.folder / "cluster.yaml").write_text(
        "nodes:\n  - {name: a, host: 127.0.0.1, port: 1, identity_file: /nonexistent/key}\n"
    )
    complains(here.run("probe"), 2, "/nonexistent/key")


@pytest.mark.slow
def test_a_host_that_refuses(here, complains: Callable[..., None]) -> None:
    (here.folder / "cluster.yaml").write_text("nodes:\n  - {name: a, host: 127.0.0.1, port: 1}\n")
    complains(here.run("probe"), 4, "a", "127.0.0.1", "refused")


def test_a_host_without_a_name(here, complains: Callable[..., None]) -> None:
    (here.folder / "cluster.yaml").write_text("nodes:\n  - {name: a, host: no-such-host.invalid}\n")
    complains(here.run("probe"), 4, "no-such-host.invalid")


@pytest.mark.slow
def test_a_node_without_python(here, complains: Callable[..., None]) -> None:
    (here.folder / "cluster.yaml").write_text(
        "nodes:\n  - {name: a, transport: local, python: /nonexistent/python3}\n"
    )
    complains(here.run("probe"), 4, "a", "/nonexistent/python3")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, ("train.py",)),
        (
            "import torch\n\nraise ValueError('not today')\n\ndef model():\n    pass\n",
            ("train.py, line 3", "not today"),
        ),
        ("def model():\n    return []\n", ("no layer",)),
        (
            "from torch import nn\nimport torch\n\n"
            "def model():\n    return [nn.Linear(4, 5), nn.Linear(6, 2)]\n\n"
            "def data(batch_size, seed):\n    while True:\n"
            "        yield torch.zeros(batch_size, 4), torch.zeros(batch_size, dtype=torch.long)\n",
            ("layer 1",),
        ),
    ],
)
def test_a_fault_in_the_workload(
    here, complains: Callable[..., None], text: str | None, words: tuple[str, ...]
) -> None:
    if text is None:
        (here.folder / "train.py").unlink()
    else:
        here.train(text)
    complains(here.run("probe", "train.py"), 2, *words)
    assert not (here.state / "profiles").exists()


@pytest.mark.slow
def test_more_microbatches_than_samples(here, complains: Callable[..., None]) -> None:
    done = here.run("probe", "train.py", "--batch-size", "4", "--microbatches", "8")
    complains(done, 2, "--microbatches 8", "--batch-size 4")


def test_a_model_larger_than_all_memory(here, complains: Callable[..., None]) -> None:
    layers = [{**layer, "state_bytes": 2e9} for layer in PROBLEM["layers"]]
    (here.folder / "problem.json").write_text(json.dumps({**PROBLEM, "layers": layers}))
    for strategy in ("even", "heuristic", "optimal"):
        complains(here.run("plan", "--problem", "problem.json", "--strategy", strategy, "-o", "p.json"), 3)
    assert not (here.folder / "p.json").exists()


def test_a_problem_of_a_newer_version(here, complains: Callable[..., None]) -> None:
    (here.folder / "problem.json").write_text(json.dumps({**PROBLEM, "version": 99}))
    complains(here.run("plan", "--problem", "problem.json"), 2, "version 99", "upgrade")


def test_a_plan_offline_and_its_verification(here) -> None:
    (here.folder / "problem.json").write_text(json.dumps(PROBLEM))
    done = here.run("plan", "--problem", "problem.json", "-o", "plan.json", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["certificate"]["status"] == "optimal"
    assert here.run("verify", "plan.json").returncode == 0
    plan = json.loads((here.folder / "plan.json").read_text())
    plan["predicted"]["iteration_s"] /= 2
    plan["certificate"]["value_s"] /= 2
    (here.folder / "plan.json").write_text(json.dumps(plan))
    assert here.run("verify", "plan.json").returncode == 1


def test_a_missing_folder_for_the_result_is_said_before_the_work(
    here, complains: Callable[..., None]
) -> None:
    done = here.run("probe", "train.py", "-o", "nowhere/profile.json")
    complains(done, 2, "nowhere", "does not exist")
    assert "connecting" not in done.stderr


def test_pins_hold_offline_too(here) -> None:
    (here.folder / "problem.json").write_text(json.dumps(PROBLEM))
    done = here.run("plan", "--problem", "problem.json", "--pin-first", "n1", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["stages"][0]["replicas"][0]["device"] == "n1/cpu:0"


@pytest.mark.slow
def test_a_dry_run_connects_to_nobody(here) -> None:
    done = here.run("probe", "train.py", "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["nodes"] == ["fast", "slow"]
    done = here.run("launch", "train.py", "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"ranks": None}
    assert not here.state.exists()


@pytest.mark.slow
def test_no_profile_yet(here, complains: Callable[..., None]) -> None:
    complains(here.run("plan", "train.py"), 2, "no profile yet", "skyctl probe train.py")


def test_an_error_with_json_is_one_document(here) -> None:
    done = here.run("plan", "train.py", "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["exit_code"] == 2


def test_help_imports_nothing_heavy(here) -> None:
    import subprocess
    import sys

    code = (
        "import sys\nfrom skyctl.cli.app import app\n"
        "try:\n    app(['--help'])\nexcept SystemExit:\n    pass\n"
        "print([m for m in ('torch', 'ortools', 'paramiko') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("[]")


@pytest.mark.slow
def test_paths_are_left_alone(here, tmp_path: Path) -> None:
    """A command that fails leaves nothing but what was there."""
    before = sorted(p.name for p in here.folder.iterdir())
    here.run("plan", "train.py", "-o", "plan.json")
    assert sorted(p.name for p in here.folder.iterdir() if p.name != "__pycache__") == before
