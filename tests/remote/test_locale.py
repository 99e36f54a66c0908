"""A launcher and a node whose locale is not UTF-8: what skyctl sends and reads is the same in any."""

from __future__ import annotations

import json
from pathlib import Path

from ..helpers.commands import run_in

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
"""Python's text is ASCII then: what does not say that it is UTF-8 fails with any other letter."""


def test_check_where_text_is_ascii(tmp_path: Path) -> None:
    node = json.dumps({"name": "a", "transport": "local", "env": ASCII})
    (tmp_path / "cluster.yaml").write_text(f"# Größe, 模型\nname: c\nnodes:\n  - {node}\n", encoding="utf-8")
    done = run_in(tmp_path, "check", "--json", SKYCTL_HOME=str(tmp_path / "state"), **ASCII)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ok"]
