"""``--link-dtype`` on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from skyctl.records.problem import Device, Layer, Link, Problem

Run = Callable[..., tuple[int, str, str]]
PLAN = ("plan", "--problem", "problem.json", "--strategy", "even")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skyctl: Run) -> Run:
    """``skyctl ARGUMENTS`` beside a problem and a cluster file: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    layer = Layer(name="l", flops=3e9, state_bytes=1.0, activation_bytes=1.0, output_bytes=1e6)
    ways = [("n1/cpu:0", "n2/cpu:0", 2e7), ("n2/cpu:0", "n1/cpu:0", 1e8)]
    problem = Problem(
        layers=(layer,) * 4,
        devices=tuple(Device(id=f"n{i}/cpu:0", flops_per_s=1e11, memory_bytes=None) for i in (1, 2)),
        links=tuple(
            Link(source=a, target=b, latency_s=0.001, bandwidth_bytes_per_s=rate) for a, b, rate in ways
        ),
        microbatches=4,
    )
    (tmp_path / "problem.json").write_text(problem.to_json())
    (tmp_path / "cluster.yaml").write_text("name: c\nnodes: [{name: n1, transport: local}]\n")
    return skyctl


def test_a_plan_says_what_is_sent_and_verifies(run: Run) -> None:
    code, out, _ = run(*PLAN, "--link-dtype", "int8@slow", "-o", "plan.json")
    assert code == 0
    assert "sent: n1/cpu:0 → n2/cpu:0 as int8 (26% of the bytes)\n" in out
    assert run("verify", "plan.json")[0] == 0
    links = json.loads(Path("plan.json").read_text())["problem"]["links"]
    assert [link.get("dtype") for link in links] == ["int8", None]
    _, out, _ = run(*PLAN, "--link-dtype", "int8", "--link-dtype", "bfloat16@n2-n1")
    assert "n2/cpu:0 → n1/cpu:0 as bfloat16 (50% of the bytes)" in out
    assert "sent:" not in run(*PLAN)[1]


def test_a_wrong_one_is_bad_usage(run: Run) -> None:
    code, _, err = run(*PLAN, "--link-dtype", "int4")
    assert code == 2
    assert "--link-dtype 'int4': 'int4' is not one of float32, bfloat16, int8" in err
    code, _, err = run(*PLAN, "--link-dtype", "int8@n1-n3")
    assert code == 2
    assert "there is no node 'n3'; there is n1, n2" in err
    code, _, err = run("launch", "gpt:layers=1,hidden=8,heads=1,context=4", "--link-dtype", "int8@n1-n2")
    assert code == 2
    assert "there is no node 'n2'; there is n1" in err


def test_a_plan_file_has_settled_it(run: Run) -> None:
    run(*PLAN, "--link-dtype", "int8", "-o", "plan.json")
    code, _, err = run("launch", "plan.json", "--link-dtype", "bfloat16")
    assert code == 2
    assert "--link-dtype bfloat16 does not go with the plan plan.json" in err
