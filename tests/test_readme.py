"""What the README shows is run: its train.py, its cluster.yaml, its Python."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from skyctl.inventory.read import read_cluster

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRACT = (ROOT / "docs" / "contract.md").read_text(encoding="utf-8")


def block(text: str, kind: str, begins: str) -> str:
    """The first fenced block of that kind that begins so."""
    for found in re.finditer(rf"```{kind}\n(.*?)```", text, re.DOTALL):
        if found[1].startswith(begins):
            return found[1]
    raise AssertionError(f"no {kind} block begins with {begins!r}")


def skyctl(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "skyctl", *words],
        cwd=folder,
        env={**os.environ, "SKYCTL_HOME": str(folder / "state")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_the_cluster_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(block(README, "yaml", "# cluster.yaml"))
    assert [node.name for node in read_cluster(path).nodes] == ["tower", "oldbox", "laptop"]


def test_the_users_own_model(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(block(README, "python", "# train.py"))
    (tmp_path / "cluster.yaml").write_text(
        "nodes:\n  - {name: a, transport: local, threads: 1}\n"
        "  - {name: b, transport: local, threads: 1, slowdown: 2.0}\n"
    )
    for words in (
        ("probe", "train.py", "--microbatches", "4"),
        ("plan", "train.py", "--microbatches", "4", "-o", "plan.json"),
        ("verify", "plan.json"),
        ("launch", "plan.json", "--steps", "3"),
    ):
        done = skyctl(tmp_path, *words)
        assert done.returncode == 0, done.stderr
    assert "loss:" in done.stdout


def test_the_python_interface(tmp_path: Path) -> None:
    problem = json.loads(block(CONTRACT, "json", '{"kind": "skyctl/problem"'))
    (tmp_path / "problem.json").write_text(json.dumps(problem))
    code = block(README, "python", "from pathlib import Path")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[1:] == ["optimal", "True"]
