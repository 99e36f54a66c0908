"""``--local-steps`` and what goes with it: plans from problem files, and what is exit 2."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.planner.data_problems import data_problem

from skyctl.cli.resume_run import _refuse_other_training
from skyctl.cli.rhythm_options import RhythmOptions
from skyctl.cli.run_options import LaunchOptions
from skyctl.errors import InputError
from skyctl.records.rhythm import Rhythm
from skyctl.workload.recipe import Recipe

Run = Callable[..., tuple[int, str, str]]
PLAN = ("plan", "--problem", "problem.json")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skyctl: Run) -> Run:
    monkeypatch.chdir(tmp_path)
    problem = data_problem(speeds=(2.0, 1.0, 1.0, 1.0), rate=1e4, microbatches=8, parallel="pipeline")
    Path("problem.json").write_text(problem.to_json())
    return skyctl


def test_owners_make_rounds_and_it_is_said(run: Run) -> None:
    more = ("--prox-mu", "0.5", "--clients-per-round", "2", "--drop-stragglers", "--round-deadline", "90")
    code, out, err = run(*PLAN, "--local-steps", "4,2,3", "--owners", "n0,n1,n2+n3", *more, "-o", "plan.json")
    assert code == 0, err
    document = json.loads(Path("plan.json").read_text())
    assert document["problem"]["owners"] == [["n0"], ["n1"], ["n2", "n3"]]
    assert [pipeline["local_steps"] for pipeline in document["pipelines"]] == [4, 2, 3]
    assert document["sync"]["of"] == "weights"
    assert "n2+n3" in out
    assert "changes training: each owner makes 2 to 4 local steps by itself" in out
    assert "FedProx" in out
    assert "2 of 3 owners a round" in out
    assert "is dropped" in out
    assert "round: " in out
    assert run("verify", "plan.json")[0] == 0


def test_each_node_is_an_owner_and_common_batches_need_none(run: Run) -> None:
    code, _, err = run(*PLAN, "--local-steps", "auto", "--owners", "all", "-o", "plan.json")
    assert code == 0, err
    document = json.loads(Path("plan.json").read_text())
    steps = [pipeline["local_steps"] for pipeline in document["pipelines"]]
    assert steps[0] == 2 * steps[1]
    assert document["problem"]["parallel"] == "data"
    code, _, err = run(*PLAN, "--parallel", "data", "--local-steps", "3", "-o", "common.json")
    assert code == 0, err
    document = json.loads(Path("common.json").read_text())
    assert sum(pipeline["microbatches"] for pipeline in document["pipelines"]) == 8
    assert document["pipeline_iteration_s"] is None, "a round is no step"
    for name in ("plan.json", "common.json"):
        assert run("verify", name)[0] == 0
    code, _, err = run(*PLAN, "--parallel", "data", "--local-steps", "3", "--assign", "n0=6,n1=2")
    assert code == 0, err


@pytest.mark.parametrize(
    ("words", "lr", "momentum"),
    [
        ((), 1.0, 0.0),
        (("--outer-lr", "0.5"), 0.5, 0.9),
        (("--outer-momentum", "0.8"), 0.7, 0.8),
        (("--outer-lr", "0.5", "--outer-momentum", "0"), 0.5, 0.0),
        (("--outer-lr", "1", "--outer-momentum", "0"), 1.0, 0.0),
    ],
)
def test_one_outer_option_brings_the_papers_value_of_the_other(
    run: Run, words: tuple[str, ...], lr: float, momentum: float
) -> None:
    code, out, err = run(*PLAN, "--local-steps", "4", *words, "-o", "plan.json")
    assert code == 0, err
    document = json.loads(Path("plan.json").read_text())
    rhythm = document["problem"]["rhythm"]
    assert (rhythm["outer_lr"], rhythm["outer_momentum"]) == (lr, momentum)
    assert ("DiLoCo" in out) == ((lr, momentum) != (1, 0))
    assert run("verify", "plan.json")[0] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--prox-mu", "0.1"), "--prox-mu goes with --local-steps"),
        (("--outer-lr", "0.7"), "--outer-lr goes with --local-steps"),
        (("--outer-momentum", "0.9"), "--outer-momentum goes with --local-steps"),
        (("--sync-delay", "1", "--outer-lr", "0.7"), "--outer-lr goes with --local-steps"),
        (("--owners", "all"), "--owners goes with --local-steps"),
        (("--drop-stragglers",), "--drop-stragglers goes with --local-steps"),
        (("--local-steps", "0"), "a whole number of at least 1, or auto"),
        (("--local-steps", "many"), "a whole number of at least 1, or auto"),
        (("--local-steps", "2,3"), "goes with --owners"),
        (("--local-steps", "2,3", "--owners", "n0,n1,n2"), "--local-steps has 2 numbers for 3 owners"),
        (("--local-steps", "2", "--prox-mu", "-1"), "--prox-mu must be"),
        (("--local-steps", "2", "--outer-lr", "0"), "--outer-lr must be a positive number, not 0"),
        (("--local-steps", "2", "--outer-lr", "nan"), "--outer-lr must be a positive number, not nan"),
        (("--local-steps", "2", "--outer-momentum", "1"), "--outer-momentum must be at least 0 and below 1"),
        (("--local-steps", "2", "--owners", "all", "--round-deadline", "0"), "--round-deadline must be"),
        (("--local-steps", "2", "--clients-per-round", "1"), "goes with --owners"),
        (("--local-steps", "2", "--owners", "n0,,n1"), "an owner has no node"),
        (("--local-steps", "2", "--owners", "n0,n0"), "names n0 twice"),
        (("--local-steps", "2", "--owners", "n0,x"), "'x' is no node"),
        (
            ("--local-steps", "2", "--owners", "n0,n1", "--clients-per-round", "3"),
            "there are only 2 owners",
        ),
        (("--local-steps", "2", "--sync-delay", "1"), "--sync-delay sums gradients"),
        (("--local-steps", "2", "--sync-format", "fixed32"), "does not go with --local-steps"),
        (("--local-steps", "2", "--sync-format", "powersgd:4"), "does not go with --local-steps"),
        (
            ("--parallel", "data", "--staleness", "2", "--sync-format", "powersgd:4"),
            "powersgd:4 goes with a synchronous rhythm",
        ),
        (
            ("--parallel", "data", "--sync-delay", "1", "--sync-format", "powersgd:4"),
            "powersgd:4 goes with a synchronous rhythm",
        ),
        (("--local-steps", "2", "--sync", "trees"), "does not go with --local-steps"),
        (("--local-steps", "2", "--schedule", "gpipe"), "--schedule gpipe"),
        (
            ("--local-steps", "2", "--parallel", "pipeline"),
            "what several pipelines sum",
        ),
        (("--local-steps", "2", "--parallel", "hybrid"), "--local-steps goes with"),
        (("--local-steps", "2", "--strategy", "alone"), "nobody to average"),
    ],
)
def test_what_contradicts_is_exit_2(run: Run, words: tuple[str, ...], message: str) -> None:
    code, out, err = run(*PLAN, *words, "-o", "plan.json")
    assert code == 2, (out, err)
    assert message in err.replace("\n", " ")
    assert not Path("plan.json").exists()


def test_a_plan_has_settled_its_rounds(run: Run) -> None:
    assert run(*PLAN, "--local-steps", "2", "--owners", "all", "-o", "plan.json")[0] == 0
    Path("cluster.yaml").write_text("nodes:\n  - {name: n0, transport: local}\n")
    code, _, err = run("launch", "plan.json", "--local-steps", "3")
    assert code == 2
    assert "--local-steps 3 does not go with the plan" in err


def test_a_trace_of_rounds_is_refused_before_anything_is_connected_to(run: Run) -> None:
    """A workload and a plan alike: of nobody here an address is known."""
    assert run(*PLAN, "--local-steps", "2", "--owners", "all", "-o", "plan.json")[0] == 0
    Path("cluster.yaml").write_text("nodes:\n  - {name: n0, host: nobody.invalid}\n")
    for words in (("gpt:layers=2", "--local-steps", "2"), ("plan.json",)):
        code, _, err = run("launch", *words, "--trace")
        is_refused = "--trace draws single steps, and a round is many" in " ".join(err.split())
        assert (code, is_refused) == (2, True), err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--local-steps", "2", "--owners", "n0,n11"), "--owners: 'n11' is no node; did you mean 'n1'?"),
        (("--local-steps", "2", "--owners", "n0,nobody"), "--owners: 'nobody' is no node; there are n0, n1"),
        (("--local-steps", "2,3,4", "--owners", "n0,n1"), "--local-steps has 3 numbers for 2 owners"),
        (
            ("--local-steps", "2", "--owners", "all", "--helper", "n1"),
            "--helper does not go with --local-steps",
        ),
    ],
)
def test_what_rounds_are_not_made_with_is_refused_before_anything_is_connected_to(
    run: Run, words: tuple[str, ...], message: str
) -> None:
    """Of nobody here an address is known."""
    hosts = "".join(f"  - {{name: {name}, host: nobody.invalid}}\n" for name in ("n0", "n1"))
    Path("cluster.yaml").write_text(f"nodes:\n{hosts}")
    for command in ("launch", "compare"):
        measured = ("--measure",) if command == "compare" else ()
        code, _, err = run(command, "gpt:layers=2", *measured, *words)
        assert (code, message in " ".join(err.split())) == (2, True), err


@pytest.mark.parametrize("owners", [(), ("--owners", "n0,n1+n2")])
def test_a_problem_of_rounds_has_one_form(run: Run, owners: tuple[str, ...]) -> None:
    assert run(*PLAN, "--local-steps", "2", *owners, "-o", "plan.json")[0] == 0
    Path("rounds.json").write_text(json.dumps(json.loads(Path("plan.json").read_text())["problem"]))
    code, _, err = run("plan", "--problem", "rounds.json", "--parallel", "auto", "-o", "auto.json")
    assert code == 0, err
    assert json.loads(Path("auto.json").read_text())["forms"] == []
    assert run("verify", "auto.json")[0] == 0


def test_a_plan_gives_nobody_another_owners_data(run: Run) -> None:
    assert run(*PLAN, "--local-steps", "2", "--owners", "n0,n1", "-o", "plan.json")[0] == 0
    text = Path("plan.json").read_text()
    document = json.loads(text)
    document["problem"]["owners"].reverse()
    Path("plan.json").write_text(json.dumps(document))
    code, _, err = run("verify", "plan.json")
    assert code == 2
    assert "pipeline 0 trains on the data of n1, and 'n0/cpu:0' is not its owner's" in err.replace("\n", " ")


def test_no_delay_leaves_staleness_as_it_is() -> None:
    assert RhythmOptions(sync_delay=0, staleness="3").make_rhythm() == Rhythm(staleness=3)
    assert RhythmOptions(sync_delay=0).make_rhythm() == Rhythm()
    assert RhythmOptions(sync_delay=1, undelayed_steps=4).make_rhythm() == Rhythm(delay=1, undelayed_steps=4)
    assert RhythmOptions().make_rhythm() is None


@pytest.mark.parametrize(
    "words",
    [
        ("--parallel", "data"),
        ("--sync", "star"),
        ("--sync-delay", "1"),
        ("--local-steps", "2"),
        ("--owners", "all"),
        ("--outer-lr", "0.7"),
        ("--outer-momentum", "0.9"),
    ],
)
def test_a_run_that_is_resumed_has_settled_how_it_is_planned(words: tuple[str, str]) -> None:
    options: Any = LaunchOptions(
        **{words[0][2:].replace("-", "_"): int(words[1]) if words[1] == "1" else words[1]}
    )
    state: Any = SimpleNamespace()
    stored_run: Any = SimpleNamespace(state=state, paths=SimpleNamespace(run_id="r"))
    names = ("batch_size", "seed", "dtype", "lora_text", "data_path", "records", "random_inputs")
    spec = SimpleNamespace(**dict.fromkeys((*names, "learning_rate")))
    request: Any = SimpleNamespace(spec=spec, recipe=Recipe(total_steps=1))
    with pytest.raises(InputError, match=f"{words[0]} {words[1]} does not go with --resume"):
        _refuse_other_training(stored_run, request, options)
