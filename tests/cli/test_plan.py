"""``skyctl plan --problem``: exports alone on stdout, whole blocks, and what is printed for a person."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skyctl.cli.app import main

IDS = [f"n{i}/cpu:0" for i in range(4)]
Run = Callable[..., tuple[int, str, str]]


def document() -> dict[str, Any]:
    """Six blocks on three devices of use, the second one short of memory, and one that is far too slow."""

    def layer(name: str, flops: float) -> dict[str, Any]:
        sizes = {"state_bytes": flops / 20, "activation_bytes": 1e7, "output_bytes": 1e6}
        return {"name": name, "flops": flops, **sizes}

    inner = [
        layer(f"block.{i}.{part}", x) for i in range(6) for part, x in (("attention", 4e9), ("mlp", 8e9))
    ]
    return {
        "kind": "skyctl/problem",
        "version": 1,
        "layers": [layer("embedding", 1e9), *inner, layer("head", 3e9)],
        "devices": [
            {"id": name, "flops_per_s": speed, "memory_bytes": memory}
            for name, speed, memory in zip(IDS, (3e10, 1e11, 5e10, 1e9), (3e9, 1.9e9, 3e9, 3e9), strict=True)
        ],
        "links": [
            {"source": a, "target": b, "latency_s": 0.005, "bandwidth_bytes_per_s": 5e7}
            for a in IDS
            for b in IDS
            if a != b
        ],
        "microbatches": 8,
    }


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """``skyctl ARGUMENTS`` in this process, beside a ``problem.json``: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "problem.json").write_text(json.dumps(document()))

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["skyctl", *arguments])
        code: Any = 0
        try:
            main()
        except SystemExit as exc:
            code = exc.code or 0
        return code, *capsys.readouterr()

    return call


PLAN = ("plan", "--problem", "problem.json")


def test_a_layout_for_megatron_is_all_there_is_on_stdout(run: Run) -> None:
    code, out, err = run(*PLAN, "--export", "megatron", "--whole-blocks", "-o", "plan.json")
    assert code == 0, err
    stages = out.removesuffix("\n").split("|")
    assert out.count("\n") == 1
    assert stages[0].startswith("E")
    assert stages[-1].endswith("L")
    plan = json.loads(Path("plan.json").read_text())
    assert len(plan["stages"]) == len(stages)
    assert len(plan["problem"]["layers"]) == 14
    ranks = ", ".join(f"{i} {stage['replicas'][0]['device']}" for i, stage in enumerate(plan["stages"]))
    assert f"pipeline ranks: {ranks}" in err
    assert run("verify", "plan.json")[0] == 0


def test_a_list_for_torchtitan(run: Run) -> None:
    code, out, err = run(*PLAN, "--export", "torchtitan", "--whole-blocks", "-q")
    assert code == 0
    assert "pipeline ranks" not in err
    parts = json.loads(out)
    assert [name for part in parts for name in part] == [
        "tok_embeddings",
        *(f"layers.{i}" for i in range(6)),
        "norm",
        "output",
    ]
    code, out, _ = run(*PLAN, "--export", "torchtitan", "--whole-blocks", "--json")
    assert code == 0
    told = json.loads(out)
    assert told["setting"] == "module_fqns_per_model_part"
    assert told["value"] == parts
    assert len(told["devices"]) == len(parts)


def test_a_cut_inside_a_block_ends_with_its_stage_and_leaves_nothing(run: Run) -> None:
    code, out, err = run(
        *PLAN, "--assign", "n0=0:2,n2=2:8,n1=8:14", "--export", "megatron", "-o", "plan.json"
    )
    assert code == 2
    assert out == ""
    assert "stage 0 ends inside block 0, after 'block.0.attention'" in err
    assert "--whole-blocks" in err
    assert not Path("plan.json").exists()
    code, out, _ = run(*PLAN, "--assign", "n0=0:3,n2=3:9,n1=9:14", "--export", "megatron")
    assert (code, out) == (0, "Et|t*3|t*2L\n")


def test_names_are_looked_at_before_the_search(run: Run) -> None:
    text = json.dumps(document()).replace("block.3.mlp", "middle")
    Path("problem.json").write_text(text)
    for flags in (("--export", "megatron"), ("--whole-blocks",)):
        code, _, err = run(*PLAN, *flags)
        assert code == 2
        assert "'middle'" in err
    assert run(*PLAN)[0] == 0


def test_flags_that_do_not_go(run: Run) -> None:
    code, _, err = run(*PLAN, "--export", "nemo")
    assert code == 2
    assert "--export 'nemo' is not one of torchtitan, megatron" in err
    code, _, err = run(*PLAN, "--whole-blocks", "--assign", "n0=0:14")
    assert code == 2
    assert "--whole-blocks does not go with --assign" in err


def test_what_a_person_is_told(run: Run) -> None:
    code, out, _ = run(*PLAN)
    assert code == 0
    for words in ("load", "memory GiB", "link ms", "what binds: ", "bound ", "gap ", "unused: n3/cpu:0"):
        assert words in out
    helps = out[out.index("what would help: ") :].splitlines()
    assert 1 <= len(helps) <= 3
    assert "more on n1/cpu:0 would save" in helps[0]


def test_json_is_the_plan_alone(run: Run) -> None:
    code, out, err = run(*PLAN, "--json")
    assert code == 0
    assert json.loads(out)["kind"] == "skyctl/plan"
    assert "what would help" not in err


def test_many_unused_devices_take_one_line(run: Run) -> None:
    made = document()
    made["devices"] += [{"id": f"m{i}/cpu:0", "flops_per_s": 1e9, "memory_bytes": 1e6} for i in range(30)]
    Path("problem.json").write_text(json.dumps(made))
    code, out, _ = run(*PLAN, "--objective", "bottleneck")
    assert code == 0
    lines = [line for line in out.splitlines() if line.startswith("unused: m")]
    assert len(lines) == 1
    assert "and 26 more: no layer fits it in any place" in lines[0]
