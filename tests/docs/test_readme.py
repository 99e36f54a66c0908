"""What the README shows is run: its cluster.yaml, its Python; its train.py and commands: test_commands.py."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from skyctl.inventory.cluster_file import read_cluster

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRACT = (ROOT / "docs" / "contract.md").read_text(encoding="utf-8")


def block(text: str, kind: str, begins: str) -> str:
    """The first fenced block of that kind that begins so."""
    for found in re.finditer(rf"```{kind}\n(.*?)```", text, re.DOTALL):
        if found[1].startswith(begins):
            return found[1]
    raise AssertionError(f"no {kind} block begins with {begins!r}")


def test_the_cluster_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(block(README, "yaml", "# cluster.yaml"))
    assert [node.name for node in read_cluster(path).nodes] == ["tower", "oldbox", "laptop"]


def test_the_users_own_model_is_the_same_everywhere() -> None:
    workloads = (ROOT / "docs" / "workloads.md").read_text(encoding="utf-8")
    assert block(README, "python", "# train.py") == block(workloads, "python", "# train.py")


def test_the_python_interface(tmp_path: Path) -> None:
    problem = json.loads(block(CONTRACT, "json", '{"kind": "skyctl/problem"'))
    (tmp_path / "problem.json").write_text(json.dumps(problem))
    code = block(README, "python", "from pathlib import Path")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[1:] == ["optimal", "True"]
