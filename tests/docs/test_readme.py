"""The README is short, and shows what runs; its train.py and commands are run by test_commands.py."""

from __future__ import annotations

import re
from pathlib import Path

from skyctl.inventory.cluster_file import read_cluster

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(text: str, kind: str, begins: str) -> str:
    """The first fenced block of that kind that begins so."""
    for found in re.finditer(rf"```{kind}\n(.*?)```", text, re.DOTALL):
        if found[1].startswith(begins):
            return found[1]
    raise AssertionError(f"no {kind} block begins with {begins!r}")


def test_the_users_own_model_is_the_same_everywhere() -> None:
    workloads = (ROOT / "docs" / "workloads.md").read_text(encoding="utf-8")
    assert block(README, "python", "# train.py") == block(workloads, "python", "# train.py")


def test_it_is_short() -> None:
    assert len(README.split()) <= 500


def test_the_reference_of_cluster_yaml_can_be_read(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "cluster-yaml.md").read_text(encoding="utf-8")
    path = tmp_path / "cluster.yaml"
    path.write_text(block(text, "yaml", "name: home"))
    assert "tower" in [node.name for node in read_cluster(path).nodes]
