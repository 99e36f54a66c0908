"""``--parallel data`` from problem files: tables, errors with exit codes, verify, and what contradicts it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.planner.data_problems import data_problem
from tests.planner.hybrid_plans import hybrid_plan

from skyctl.cli.command_output import Output
from skyctl.cli.show_plan import show_plan
from skyctl.errors import InputError
from skyctl.planner.api import plan
from skyctl.planner.trainer_export import export_plan
from skyctl.planning.assignment import parse_assigned_shares
from skyctl.planning.plan_creation import plan_best
from skyctl.planning.plan_options import PlanOptions
from skyctl.planning.plan_pairs import unlinked_pairs
from skyctl.records.plan import WorkloadRef

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skyctl: Run) -> Run:
    monkeypatch.chdir(tmp_path)
    problem = data_problem(speeds=(2.0, 1.0, 1.0), rate=1e4, microbatches=8, parallel="pipeline")
    Path("problem.json").write_text(problem.to_json())
    return skyctl


PLAN = ("plan", "--problem", "problem.json", "--parallel", "data")


def test_a_plan_says_what_a_step_takes_without_each_node(run: Run) -> None:
    code, out, err = run(*PLAN)
    assert code == 0, err
    assert (
        "if a node leaves and the others go on: a step takes 24.0 s (2.00×) without n0, 18.0 s (1.50×) "
        "without n1 or n2; the step in which it leaves takes up to 24.0 s\n"
    ) in out
    code, out, err = run(*PLAN, "--json", "-o", "plan.json")
    document = json.loads(out)
    assert [step["node"] for step in document["without"]] == ["n0", "n1", "n2"]
    assert set(document["without"][0]) == {"node", "step_s", "factor", "leaving_step_s"}
    assert document["without"][1]["factor"] == pytest.approx(18.01 / 12.01)
    del document["without"]
    assert document == json.loads(Path("plan.json").read_text())
    Path("printed.json").write_text(out)
    assert run("verify", "printed.json")[0] == 0
    code, out, _ = run("plan", "--problem", "problem.json", "--parallel", "pipeline")
    assert (code, "if a node leaves" in out) == (0, False)
    assert "without" not in json.loads(run("plan", "--problem", "problem.json", "--json")[1])


def test_a_plan_says_who_computes_what_and_what_a_pipeline_would_take(run: Run) -> None:
    code, out, err = run(*PLAN, "-o", "plan.json")
    assert code == 0, err
    document = json.loads(Path("plan.json").read_text())
    assert [p["microbatches"] for p in document["pipelines"]] == [4, 2, 2]
    assert document["problem"]["parallel"] == "data"
    assert document["pipeline_iteration_s"] > document["predicted"]["iteration_s"]
    assert "beside it: this is" in out
    assert "as fast as a pipeline" in out
    assert "of gradients as float32 take " in out
    assert "sync: " in out
    assert "all layers on each device" in out
    assert "what would help" not in out
    assert run("verify", "plan.json")[0] == 0
    for name, words in (
        ("int8", "as int8 (rounded on each hop: changes training) take "),
        ("fixed32", "as fixed32 take "),
    ):
        assert f"of gradients {words}" in run(*PLAN, "--sync-format", name)[1]
    code, _, err = run(*PLAN, "--sync-format", "powersgd:300")
    assert (code, "powersgd:R with a rank R from 1 to 256" in err) == (2, True)
    code, _, err = run(*PLAN, "--sync-format", "powersgd:4")
    assert (code, "needs the gradient_bytes and gradient_matrices of every layer" in err) == (2, True)
    code, _, err = run(*PLAN, "--uncompressed-steps", "4")
    text = " ".join(err.split())
    assert (code, "--uncompressed-steps 4 is of --sync-format powersgd:R" in text) == (2, True)
    assert "next: add --sync-format powersgd:4, or --uncompressed-steps 0" in text
    code, _, err = run(*PLAN, "--sync-format", "powersgd:4", "--sync-delay", "1")
    text = " ".join(err.split())
    assert (code, "--sync-format powersgd:4 goes with a synchronous rhythm only" in text) == (2, True)
    assert "next: leave --sync-format out" in text
    code, out, _ = run(*PLAN, "--json", "--sync-format", "bfloat16")
    assert code == 0
    assert json.loads(out)["sync"]["format"] == "bfloat16"


def test_routes_are_drawn_and_a_pipeline_has_none(run: Run) -> None:
    code, _, err = run(*PLAN, "--plot", "routes.svg")
    assert code == 0, err
    assert Path("routes.svg").read_text().startswith("<svg ")
    code, _, err = run("plan", "--problem", "problem.json", "--plot", "none.svg")
    assert code == 0, err
    assert "no picture none.svg: this plan sums no gradients" in err
    assert not Path("none.svg").exists()
    code, _, err = run(*PLAN, "--plot", "routes.PNG")
    assert (code, "charts are SVG files" in err, "next: --plot routes.svg" in err) == (2, True, True)


def test_a_batch_too_small_to_pay_names_the_least_that_would(run: Run) -> None:
    slow = data_problem(rate=100.0, gradient=10_000.0)
    Path("problem.json").write_text(slow.to_json())
    code, out, err = run("plan", "--problem", "problem.json")
    assert code == 0, err
    text = " ".join(out.split())
    assert "no other device pays for its gradients: the first would be n1/cpu:0, from 68 microbatches" in text


def test_shares_of_ones_own(run: Run) -> None:
    code, out, err = run(*PLAN, "--assign", "n0=5,n2=3", "--json")
    assert code == 0, err
    assert [p["microbatches"] for p in json.loads(out)["pipelines"]] == [5, 3]
    for words, message in (
        (("--assign", "n0=5,n2=4"), "add up to 9 microbatches"),
        (("--assign", "n0=5,n9=3"), "--assign names 'n9'"),
        (("--assign", "n0=0:2"), "every device has all"),
        (("--schedule", "gpipe"), "orders a pipeline's stages"),
        (("--objective", "bottleneck"), "slowest stage"),
        (("--whole-blocks",), "nothing is cut"),
    ):
        code, _, err = run(*PLAN, *words)
        assert (code, message in err) == (2, True), err
    for words in (("--assign", "n0=5,n2=3"), ("--sync-format", "bfloat16"), ("--sync", "ring")):
        code, _, err = run("plan", "--problem", "problem.json", *words)
        assert code == 2
        assert "--parallel data" in err
    assert parse_assigned_shares("n0=0:5") is None


def test_auto_says_what_each_form_came_to(run: Run) -> None:
    code, out, err = run("plan", "--problem", "problem.json", "--parallel", "auto", "-o", "plan.json")
    assert code == 0, err
    document = json.loads(Path("plan.json").read_text())
    assert [form["parallel"] for form in document["forms"]] == ["pipeline", "data", "hybrid"]
    assert document["problem"]["parallel"] == "data"
    assert "step, predicted" in out
    assert "data*" in out
    assert "form: data parallelism, " in out
    assert "beside it" not in out
    code, out, err = run("plan", "--problem", "problem.json", "--parallel", "auto", "--schedule", "gpipe")
    assert code == 0, err
    text = " ".join(out.split())
    assert "data parallelism: schedule gpipe goes with one pipeline only" in text
    assert "form: one device alone; no other form has a plan with these options" in text
    for words in (("--sync", "ring", "--schedule", "gpipe"), ("--objective", "bottleneck", "--sync", "ring")):
        code, _, err = run("plan", "--problem", "problem.json", "--parallel", "auto", *words)
        assert (code, "no form of plans goes with these options" in err) == (2, True), err


def test_auto_says_which_device_is_too_small_for_a_form(run: Run) -> None:
    small = data_problem(speeds=(2.0, 1.0), layers=4, gradient=1e6, memory=[9e6, 9e6], parallel="pipeline")
    Path("problem.json").write_text(small.to_json())
    code, out, err = run("plan", "--problem", "problem.json", "--parallel", "auto", "-o", "plan.json")
    assert code == 0, err
    text = " ".join(out.split())
    assert "data parallelism: does not fit: no device can hold the whole model: n0/cpu:0 needs 15." in text
    document = json.loads(Path("plan.json").read_text())
    assert document["problem"]["parallel"] == "pipeline"
    outcome = document["forms"][1]
    assert (outcome["parallel"], outcome["fits"], outcome["iteration_s"]) == ("data", False, None)


def test_other_trainers_take_one_pipeline() -> None:
    for trainer in ("torchtitan", "megatron"):
        with pytest.raises(InputError, match=f"2 pipelines; {trainer} takes the cuts of one") as caught:
            export_plan(hybrid_plan(), trainer)
        assert caught.value.hint == "plan one: --parallel pipeline"


def test_what_does_not_go_with_several_pipelines(run: Run) -> None:
    for words, message in (
        (("--assign", "n0=5,n2=3"), "has no way to say both"),
        (("--schedule", "gpipe"), "goes with one pipeline"),
        (("--helper", "n1"), "only help to sum"),
    ):
        code, _, err = run("plan", "--problem", "problem.json", "--parallel", "hybrid", *words)
        assert (code, message in err) == (2, True), err


def test_several_pipelines_are_shown_one_after_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    workload = WorkloadRef(source="x", digest="0", batch_size=17, dtype="float32", seed=0)
    show_plan(Output(), hybrid_plan(workload=workload))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:6] for line in lines[1:4]] == [
        ["0", "6", "13", "0", "n0/cpu:0", "0:2"],
        ["1", "n1/cpu:0", "2:4", "9.000", "██████████████████··", "90%"],
        ["1", "2", "4", "0", "n2/cpu:0", "0:4"],
    ]
    text = " ".join(lines[4:])
    assert (
        "sync: 2 groups of layers: layers 0:2 (200 B) a star at n0, 0.08 Mbit/s; layers 2:4 (200 B)" in text
    )
    assert "400 B of gradients as float32 are summed 40.0 ms after the last backward" in text
    assert "busy longest: n0/cpu:0, 9.00 s of a step (90.0%)" in text
    assert "step: 10.0000 s predicted (8 microbatches, 2 pipelines, 1f1b)" in text


N0, N1, N2 = (f"n{i}/cpu:0" for i in range(3))
STAR = {"share": 1.0, "root": N0, "up": [[N1, N0]], "down": [[N0, N1]]}
UP = ("sync", "groups", 0, "routes", 0, "up")


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (
            ("pipelines", 0, "stages", 0, "device"),
            "n9/cpu:0",
            "stages name device 'n9/cpu:0', which",
        ),
        (
            ("pipelines", 0, "microbatches"),
            -1,
            "pipelines.0.microbatches: Input should be greater",
        ),
        (("pipelines", 0, "microbatches"), 5, "the pipelines take 9 microbatches, the problem has 8"),
        (("pipelines", 1), None, "pipelines.1: Input should be"),
        (("sync",), None, "several pipelines need a sync"),
        (("sync", "format"), "int4", "sync.format: there is float32, bfloat16, fixed32, int8 and powersgd:R"),
        (("sync", "uncompressed_steps"), 3, "sync: uncompressed_steps is of the format powersgd:R"),
        (("sync", "groups", 0, "routes"), [STAR], "a route leaves out 'n2/cpu:0', which holds the layers"),
        (("sync", "groups", 0, "routes", 0, "share"), 0.5, "the shares of a sync group's routes sum to "),
        (UP, [[N1, N2], [N2, N1]], "up: no way leads from 'n1/cpu:0'"),
        (UP, [[N1]], "up: an edge names two devices"),
        (("sync", "groups", 0, "stop"), 1, "sync groups cover 1 layers, the problem has 2"),
        (("version",), 16, "reads version 15 only\n  next: make it anew: skyctl plan WORKLOAD -o plan.json"),
        (("version",), 14, "plan.json is skyctl/plan version 14; this skyctl reads version 15 only"),
    ],
    ids=lambda value: None if not isinstance(value, str) else value[:30],
)
def test_a_plan_with_a_broken_field_is_exit_2_and_names_it(
    run: Run, at: tuple[str | int, ...], value: object, message: str
) -> None:
    raw = json.loads(plan(data_problem(speeds=(2.0, 1.0, 1.0), rate=1e4, microbatches=8)).to_json())
    place = raw
    for step in at[:-1]:
        place = place[step]
    place[at[-1]] = value
    Path("plan.json").write_text(json.dumps(raw))
    code, _, err = run("verify", "plan.json")
    assert (code, message in err) == (2, True), err
    assert "after validation" not in err, "what follows from the fault"


def test_a_plan_that_claims_too_much_is_exit_1(run: Run) -> None:
    planned = plan(data_problem(speeds=(2.0, 1.0, 1.0), rate=1e4, microbatches=8))
    sure = planned.certificate.model_copy(update={"status": "bounded", "lower_bound_s": 1.0, "gap": 0.0})
    moved = zip(planned.pipelines, (3, 3, 2), strict=True)
    for update in (
        {"predicted": planned.predicted.model_copy(update={"sync_s": 0.0})},
        {"certificate": sure},
        {"pipelines": tuple(p.model_copy(update={"microbatches": m}) for p, m in moved)},
    ):
        Path("plan.json").write_text(planned.model_copy(update=update).to_json())
        code, out, _ = run("verify", "plan.json")
        assert (code, "does not hold" in out) == (1, True), update


def test_what_does_not_fit_is_exit_3_and_names_the_pipeline_that_does(run: Run) -> None:
    small = data_problem(memory=[500.0, 700.0])
    Path("problem.json").write_text(small.to_json())
    code, _, err = run("plan", "--problem", "problem.json")
    assert code == 3
    assert "n1/cpu:0 needs 800 B and has 700 B (100 B short)" in err
    assert "a pipeline fits: --parallel pipeline" in err
    code, _, err = run("plan", "--problem", "problem.json", "--strategy", "even", "--microbatches", "1")
    assert code == 3
    assert "2 devices need 2 microbatches a step, it has 1" in err
    assert run("plan", "--problem", "problem.json", "--parallel", "pipeline")[0] == 0


def test_samples_are_shown_where_the_batch_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    planned = plan(data_problem(speeds=(2.0, 1.0, 1.0), rate=1e4))
    ref = WorkloadRef(source="train.py", digest="0", batch_size=18, dtype="float32", seed=0)
    show_plan(Output(), planned.model_copy(update={"workload": ref}))
    lines = capsys.readouterr().out.splitlines()
    at = lines[0].split().index("samples")
    assert [int(line.split()[at]) for line in lines[1:4]] == [10, 4, 4]  # 3, 3, 2, 2, … a microbatch


def test_pairs_without_a_link_are_those_of_the_routes() -> None:
    problem = data_problem(speeds=(1.0,) * 3, rate=1e4, microbatches=9)
    kept = tuple(x for x in problem.links if {x.source, x.target} != {"n0/cpu:0", "n1/cpu:0"})
    planned = plan(problem.model_copy(update={"links": kept}), "even")
    assert unlinked_pairs(planned) == [("n0/cpu:0", "n1/cpu:0")]  # of a ring, which sends one way


def test_a_pair_that_could_not_be_connected_is_avoided() -> None:
    problem = data_problem(speeds=(1.0,) * 3, rate=1e4, microbatches=9)
    dead = tuple(
        x.model_copy(update={"latency_s": 3600.0}) if {x.source, x.target} == {"n0/cpu:0", "n1/cpu:0"} else x
        for x in problem.links
    )
    planned = plan_best([problem.model_copy(update={"links": dead})], PlanOptions())
    assert planned.sync is not None
    assert [route.root for route in planned.sync.groups[0].routes] == ["n2/cpu:0"]


SPARSE = """
import torch
from torch import nn


def model():
    return [nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(8, 3)]


def data(batch_size, seed):
    while True:
        yield torch.zeros(batch_size, 2, dtype=torch.long), torch.zeros(batch_size, dtype=torch.long)
"""


@pytest.mark.parametrize(
    "words",
    [
        ("launch", "train.py", "--steps", "1", "--parallel", "data"),
        ("launch", "train.py", "--steps", "1", "--local-steps", "2"),
        ("launch", "train.py", "--steps", "1", "--parallel", "auto", "--sync-delay", "1"),
        ("compare", "train.py", "--parallel", "data"),
    ],
)
def test_sparse_gradients_are_refused_before_anything_starts(run: Run, words: tuple[str, ...]) -> None:
    Path("train.py").write_text(SPARSE)
    Path("cluster.yaml").write_text("name: here\nnodes: [{name: a, transport: local}]\n")
    code, _, err = run(*words, "--batch-size", "4")
    assert code == 2, err
    text = " ".join(err.split())
    assert "layer Embedding is an embedding with sparse=True" in text
    assert "sparse=False makes it dense; a pipeline" in text
