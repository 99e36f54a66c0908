"""``skyctl plan --problem``: exports alone on stdout, whole blocks, and what is printed for a person."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skyctl.cli.command_output import Output
from skyctl.cli.progress_display import strip_control
from skyctl.cli.show_plan import show_plan
from skyctl.compare.number_format import format_estimate
from skyctl.planner.api import plan
from skyctl.planner.plan_record import make_certificate
from skyctl.records.interval import Interval
from skyctl.records.plan import Plan, WholeBlocksProof
from skyctl.records.problem import Problem

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
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skyctl: Run) -> Run:
    """``skyctl ARGUMENTS`` in this process, beside a ``problem.json``: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "problem.json").write_text(json.dumps(document()))
    return skyctl


PLAN = ("plan", "--problem", "problem.json")


def test_a_layout_for_megatron_is_all_there_is_on_stdout(run: Run) -> None:
    code, out, err = run(*PLAN, "--export", "megatron", "--whole-blocks", "-o", "plan.json")
    assert code == 0, err
    stages = out.removesuffix("\n").split("|")
    assert out.count("\n") == 1
    assert stages[0].startswith("E")
    assert stages[-1].endswith("L")
    plan_file = json.loads(Path("plan.json").read_text())
    assert len(plan_file["stages"]) == len(stages)
    assert len(plan_file["problem"]["layers"]) == 14
    ranks = ", ".join(f"{i} {stage['replicas'][0]['device']}" for i, stage in enumerate(plan_file["stages"]))
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
    listing = json.loads(out)
    assert listing["setting"] == "module_fqns_per_model_part"
    assert listing["value"] == parts
    assert len(listing["devices"]) == len(parts)


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
    for flags in (["--whole-blocks"], ["--strategy", "optimal"]):
        code, _, err = run(*PLAN, *flags, "--assign", "n0=0:14")
        assert code == 2
        assert f"{flags[0]} does not go with --assign" in err
    for flags in (
        ["--dtype", "bfloat16"],
        ["--batch-size", "32"],
        ["--seed", "0"],
        ["--no-learn"],
        ["--encrypt"],
    ):
        code, _, err = run("plan", "gpt:layers=2", "--from-run", "some-run", *flags)
        assert code == 2
        assert f"{flags[0]} does not go with --from-run some-run" in err


def test_owners_of_several_nodes_do_not_hold_all_layers_each(run: Run) -> None:
    rounds = ("--local-steps", "4", "--owners", "n0,n1,n2+n3")
    code, _, err = run(*PLAN, *rounds, "--parallel", "data")
    assert code == 2
    assert "the owner n2+n3 has 2 nodes, which share them" in err
    for allowed in (rounds, (*rounds[:3], "n0,n1,n2,n3", "--parallel", "data")):
        assert "which share them" not in run(*PLAN, *allowed)[2]


@pytest.mark.parametrize(
    "flags",
    [
        ("--batch-size", "16"),
        ("--seed", "1"),
        ("--dtype", "bfloat16"),
        ("--data", "problem.json"),
        ("--ship", "problem.json"),
        ("--random-inputs",),
        ("--no-compare",),
        ("--no-learn",),
        ("--encrypt",),
        ("-c", "cluster.yaml"),
        ("--limit", "n0"),
    ],
)
def test_what_a_problem_file_settles_may_not_be_given(run: Run, flags: tuple[str, ...]) -> None:
    code, _, err = run(*PLAN, *flags)
    assert code == 2
    flag = "--cluster" if flags[0] == "-c" else flags[0]
    assert f"{flag} does not go with --problem problem.json, which says it all" in err


def test_what_a_person_is_told(run: Run) -> None:
    code, out, _ = run(*PLAN)
    assert code == 0
    for words in ("load", "memory GiB", "link ms", "what binds: ", "unused: n3/cpu:0"):
        assert words in out
    lines = out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("what binds: "))
    assert re.fullmatch(r"step: [\d.]+ s predicted \(8 microbatches, 1f1b\)", lines[at + 1])
    assert re.match(r"how sure: proved optimal for these numbers \(.*, [\d.]+ s\)$", lines[at + 2])
    helps = out[out.index("what would help: ") :].splitlines()
    assert 2 <= len(helps) <= 3
    assert helps[0].startswith("what would help: --schedule eager-1f1b would save ")
    assert "more on n1/cpu:0 would save" in helps[1]


def test_how_sure_in_the_objectives_own_words(run: Run) -> None:
    _, out, _ = run(*PLAN, "--objective", "bottleneck")
    assert re.search(
        r"^slowest stage: [\d.]+ s a microbatch \(links ignored\); a step takes [\d.]+ s", out, re.M
    )
    assert "how sure: proved optimal for these numbers (" in out
    for strategy in ("even", "heuristic"):
        _, out, _ = run(*PLAN, "--strategy", strategy)
        assert f"how sure: no bound is claimed (strategy {strategy}: " in out
        assert "optimal:" not in out
    _, out, _ = run(*PLAN, "--whole-blocks")
    assert "how sure: proved optimal among plans that cut between blocks only (" in out
    assert "unused: n3/cpu:0: proved: the best plan of whole blocks does without it" in out


def test_how_sure_where_the_time_ran_out(capsys: pytest.CaptureFixture[str]) -> None:
    problem = Problem.model_validate_json(json.dumps(document()))
    planned = plan(problem)
    value = planned.certificate.value_s
    among = WholeBlocksProof(status="bounded", lower_bound_s=value / 1.05, method="trips")
    for whole_blocks, words in (
        (None, "no plan can be faster than "),
        (among, "no plan that cuts between blocks only can be faster than "),
    ):
        bounded = make_certificate(value, value / 1.05, proved=False, method="trips", wall_s=1.0)
        bounded = bounded.model_copy(update={"whole_blocks": whole_blocks})
        show_plan(Output(), planned.model_copy(update={"certificate": bounded}), time_limit_reached=True)
        out = capsys.readouterr().out
        assert f"how sure: not proved: {words}{value / 1.05:.4f} s (gap 5%) (trips, 1.00 s)" in out
        assert out.endswith("next: a longer --time-limit may close the gap\n")


def test_even_is_told_of_optimal_and_nothing_is_announced_in_vain(run: Run) -> None:
    code, out, err = run(*PLAN, "--strategy", "even")
    assert code == 0
    assert "what would help: --strategy optimal would save " in out
    assert err == "plan: searching\n"


def test_devices_hardly_needed_have_a_line_of_their_own(run: Run) -> None:
    problem = document() | {"links": []}
    problem["layers"] = [problem["layers"][1] | {"flops": x} for x in (9e10, 1e9, 1e9)]
    problem["devices"] = [d | {"flops_per_s": 3e10, "memory_bytes": None} for d in problem["devices"][:3]]
    Path("problem.json").write_text(json.dumps(problem))
    _, out, _ = run(*PLAN, "--objective", "bottleneck")
    assert re.search(
        r"^hardly needed(, each by itself)?: n\d/cpu:0 \(nothing is lost without it\)", out, re.M
    )


def test_a_pair_without_a_link_is_told(run: Run) -> None:
    problem = document()
    problem["links"] = [x for x in problem["links"] if {x["source"], x["target"]} != {IDS[0], IDS[2]}]
    Path("problem.json").write_text(json.dumps(problem))
    flags = ("--assign", "n0=0:5,n2=5:12,n1=12:14")
    _, _, err = run(*PLAN, *flags)
    assert "no link is given for n0/cpu:0 → n2/cpu:0, n2/cpu:0 → n0/cpu:0: taken as free" in err
    Path("problem.json").write_text(json.dumps(problem | {"links": []}))
    assert "no link is given" not in run(*PLAN, *flags)[2]


def test_memory_all_reserved_is_no_fault(run: Run) -> None:
    problem = document()
    problem["devices"][3]["reserved_bytes"] = 4e9
    Path("problem.json").write_text(json.dumps(problem))
    code, out, _ = run(*PLAN)
    assert code == 0
    assert "unused: n3/cpu:0: it can hold nothing: 3.73 GiB of its 2.79 GiB are reserved" in out


@pytest.mark.parametrize("width", [60, 80, 100, 130])
@pytest.mark.parametrize("node", ["n2", "a-machine-with-a-long-name-in-the-corner"])
def test_a_narrow_terminal_cuts_no_number(width: int, node: str) -> None:
    """Columns go in a fixed order; lines break between words; a name loses its middle."""
    problem = json.dumps(document()).replace("n2/", f"{node}/")
    planned = plan(Problem.model_validate_json(problem))
    text = on_terminal(planned, width)
    lines = [line.rstrip() for line in text.splitlines()]
    heading = next(line for line in lines if "stage" in line)
    for name in ("stage", "device", "layers", "busy s", "busy", "memory GiB"):
        assert name in heading
    spared = [name for name in ("link ms", "in flight", "load", "from … to") if name in heading]
    assert spared == ["link ms", "in flight", "load", "from … to"][: len(spared)]
    for stage, view in zip(planned.stages, planned.predicted.replicas, strict=True):
        row = next(line for line in lines if f" {stage.start}:{stage.stop} " in line)
        assert f"{view.compute_s:.3f}" in row
        assert "GiB" not in row
        assert re.search(r"\d\.\d\d of \d\.\d\d", row)
        assert "cpu:0" in row
    for line in lines:
        assert len(line) <= max(width, 62)
    words = set(" ".join(lines[lines.index(heading) + 2 + len(planned.stages) :]).split())
    assert {"optimal", "numbers"} <= words


def on_terminal(planned: Plan, width: int) -> str:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(width))
        patch.setenv("TERM", "xterm")
        patch.setattr(sys, "stdout", screen)
        show_plan(Output(), planned)
    return strip_control(screen.getvalue())


def test_the_step_has_its_interval(capsys: pytest.CaptureFixture[str]) -> None:
    planned = plan(Problem.model_validate(document()))
    step_s = planned.predicted.iteration_s
    for objective, what in (("iteration", "step: "), ("bottleneck", "a step takes ")):
        sure = planned.predicted.model_copy(
            update={"interval": Interval(low_s=0.9 * step_s, high_s=1.2 * step_s)}
        )
        problem = planned.problem.model_copy(update={"objective": objective})
        show_plan(Output(), planned.model_copy(update={"predicted": sure, "problem": problem}))
        assert f"{what}{format_estimate(step_s, sure.interval)} predicted" in capsys.readouterr().out


def test_json_is_the_plan_alone(run: Run) -> None:
    code, out, err = run(*PLAN, "--json")
    assert code == 0
    assert json.loads(out)["kind"] == "skyctl/plan"
    assert "what would help" not in err


def test_many_unused_devices_take_one_line(run: Run) -> None:
    problem = document()
    problem["devices"] += [{"id": f"m{i}/cpu:0", "flops_per_s": 1e9, "memory_bytes": 1e6} for i in range(30)]
    Path("problem.json").write_text(json.dumps(problem))
    code, out, _ = run(*PLAN, "--objective", "bottleneck")
    assert code == 0
    lines = [line for line in out.splitlines() if line.startswith("unused: m")]
    assert len(lines) == 1
    assert "and 26 more: its memory is too small for any of the layers" in lines[0]
