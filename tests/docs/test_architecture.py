"""The walk in docs/architecture.md: one layer's measured seconds lead to its stage's prediction."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from ..helpers.commands import run_briefly

PAGE = Path(__file__).resolve().parents[2] / "docs" / "architecture.md"


@pytest.mark.slow
def test_a_layers_seconds_can_be_followed(tmp_path: Path) -> None:
    block = re.search(r"```\n(skyctl init --local 2\n.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    for line in block[1].replace("\\\n", "").splitlines():
        words = shlex.split(line)[1:]
        done = run_briefly(tmp_path, *words, *(["--json", "-y"] if words[0] == "launch" else []))
        assert done.returncode == 0, done.stderr
    profile, plan = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("profile", "plan"))
    attention = profile["devices"][0]["timings"][1]["forward_s"]
    problem = plan["problem"]
    assert problem["layers"][1]["name"] == "block.0.attention"
    forward = problem["times"]["local-1/cpu:0"]["forward_s"]
    assert forward[1] == attention
    overhead_s = problem["devices"][0]["action_s"] / 2
    predicted = json.loads(done.stdout)["replicas"][0]["predicted"]["forward_s"]
    assert predicted == pytest.approx(4 * (sum(forward[:6]) + overhead_s))
