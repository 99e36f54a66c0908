"""Runs whose steps survive lost devices, on a small cluster: the attempt goes on, and so do its losses."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ..helpers.hybrid_plans import hybrid_plan
from ..helpers.processes import left_of_state
from ..helpers.runs import Run, losses_of
from .test_data_plans import SIZES, TRAIN

STEPS, EVERY = 42, 5
EXACT = ("--sync-format", "fixed32")
PLANS = {
    "four": ("--parallel", "data", *EXACT, "--sync", "ring", "--assign", "a=1,b=1,c=1,d=1"),
    "three": ("--parallel", "data", *EXACT, "--assign", "a=2,b=1,c=1"),
    "two": ("--parallel", "data", *EXACT, "--assign", "c=3,d=1"),
    "pipeline": ("--assign", "b=0:2,c=2:4,d=4:7"),
    "delayed": ("--parallel", "data", "--sync-delay", "1", "--assign", "a=1,b=1,c=1,d=1"),
}
HYBRID = [([("a/cpu:0", 0, 3), ("b/cpu:0", 3, 7)], 3), ([("c/cpu:0", 0, 5), ("d/cpu:0", 5, 7)], 1)]
"""(device, start, stop) of each pipeline's stages, and its microbatches."""
ALIKE = ("timings", "flops_per_s", "handling_s", "handling_byte_s", "action_s", "step_s")
"""Figures of a device that say whether it pays that it enters."""


@pytest.fixture(scope="module")
def nodes(another: Callable[..., Any]) -> Any:
    """Four nodes, and a plan of each kind."""
    made = another("a", "b", "c", "d")
    node = "  - {{name: {name}, transport: local, threads: 1, memory_gib: 2}}\n"
    lines = "".join(node.format(name=name) for name in "abcd")
    (made.folder / "cluster.yaml").write_text(f"name: here\nnodes:\n{lines}")
    made.train(TRAIN)
    made.probe_briefly("train.py", *SIZES, "--links", "none")
    (path,) = (made.state / "profiles").rglob("*.json")
    profile = json.loads(path.read_text())
    for device in profile["devices"]:  # as they are: by a short probe one of them may seem half as fast
        device |= {name: profile["devices"][0][name] for name in ALIKE}
    path.write_text(json.dumps(profile))
    for name, form in PLANS.items():
        made.run_inside("plan", "train.py", *SIZES, *form, "-o", f"{name}.json")
    hybrid = hybrid_plan(json.loads((made.folder / "four.json").read_text()), HYBRID)
    (made.folder / "hybrid.json").write_text(json.dumps(hybrid))
    return made


@pytest.fixture(scope="module")
def losses(nodes: Any) -> list[float]:
    """Of a run that nothing happens to."""
    calm = ("--steps", str(STEPS), "--elastic", "--checkpoint-every", "0", "--json")
    return losses_of(nodes.run_inside("launch", "four.json", *calm, code=0))


@pytest.fixture(autouse=True)
def _ends(nodes: Any) -> Iterator[None]:
    """A test that fails half-way leaves no run behind, and no fault."""
    yield
    nodes.end()
    nodes.fault.unlink(missing_ok=True)


def launch(nodes: Any, plan: str = "four", *words: str) -> Run:
    steps = ("--steps", str(STEPS), "--checkpoint-every", str(EVERY))
    run: Run = nodes.launch(f"{plan}.json", *steps, "--elastic", *words)
    return run


@pytest.mark.slow
@pytest.mark.parametrize("node", ["a", pytest.param("c", marks=pytest.mark.matrix)])
def test_a_rank_is_killed_and_the_attempt_goes_on(nodes: Any, losses: list[float], node: str) -> None:
    """The first one validates, writes checkpoints and counts votes: the next one does all that then."""
    run = launch(nodes).wait_for(13)
    os.kill(run.rank(node), signal.SIGKILL)
    err = run.end().stderr
    run.is_as(losses, 1)
    assert f"rank {'abcd'.index(node)} on {node}/cpu:0 (node {node})" in err
    assert run.state["checkpoint"] == STEPS
    assert "is not on other nodes" not in err
    assert left_of_state(nodes.state) == []


@pytest.mark.matrix
@pytest.mark.parametrize("fault", ["agent", "SIGSTOP", "sum"])
def test_a_node_is_lost_or_stands_still(nodes: Any, losses: list[float], fault: str) -> None:
    if fault == "sum":
        nodes.fault.write_text("sum b")
    run = launch(nodes)
    if fault != "sum":
        run.wait_for(13)
        pid = run.agent("b") if fault == "agent" else run.rank("b")
        os.kill(pid, signal.SIGSTOP if fault == "SIGSTOP" else signal.SIGKILL)
    run.end()
    run.is_as(losses, 1)
    assert left_of_state(nodes.state) == []


@pytest.mark.matrix
def test_of_two_one_goes_on_as_the_launcher_is_their_witness(nodes: Any, losses: list[float]) -> None:
    run = launch(nodes, "two").wait_for(13)
    os.kill(run.rank("c"), signal.SIGKILL)
    run.end()
    run.is_as(losses, 1)


@pytest.mark.slow
@pytest.mark.parametrize("node", ["b", *(pytest.param(n, marks=pytest.mark.matrix) for n in "acd")])
def test_a_pipeline_without_a_stage_leaves_and_the_other_goes_on(
    nodes: Any, losses: list[float], node: str
) -> None:
    """The first one validates, writes checkpoints and has the weights: the other does all that then."""
    run = launch(nodes, "hybrid", "--ignore-changes").wait_for(13)
    os.kill(run.rank(node), signal.SIGKILL)
    err = run.end().stderr
    run.is_as(losses, 1)
    assert run.state["checkpoint"] == STEPS
    assert "is not on other nodes" not in err
    assert left_of_state(nodes.state) == []


@pytest.mark.slow
def test_a_resumed_run_stays_elastic(nodes: Any, losses: list[float]) -> None:
    run = launch(nodes).wait_for(13)
    nodes.run_inside("stop", run.id, code=0)
    run.end(130)
    run.is_stopped()
    run.child = nodes.start("launch", "--resume", run.id, "--json")
    run.more()
    os.kill(run.rank("b"), signal.SIGKILL)
    run.end()
    run.is_as(losses, 2)  # the one that was stopped, and one that nothing ends
    assert left_of_state(nodes.state) == []


@pytest.mark.slow
def test_with_too_few_it_goes_on_from_its_checkpoint(nodes: Any, losses: list[float]) -> None:
    run = launch(nodes, "four", "--min-pipelines", "4").wait_for(13)
    os.kill(run.rank("d"), signal.SIGKILL)
    run.end()
    run.is_as(losses, 2)
    assert run.state["attempts"][1]["from_step"] >= 2 * EVERY


@pytest.mark.parametrize(
    ("plan", "words", "why"),
    [
        ("pipeline", (), "the plan has one pipeline"),
        ("delayed", (), "late, stale or made in rounds"),
        ("four", ("--min-pipelines", "5"), "--min-pipelines 5: the plan has 4"),
        ("four", ("--backend", "gloo"), "needs the backend skyctl"),
        ("four", ("--trace",), "compares clocks with all ranks"),
    ],
)
def test_what_does_not_survive_is_refused(nodes: Any, plan: str, words: tuple[str, ...], why: str) -> None:
    done = nodes.run_inside("launch", f"{plan}.json", "--steps", "3", "--elastic", *words, code=2)
    assert why in " ".join(done.stderr.split())


def test_fewest_pipelines_without_elastic_are_refused(nodes: Any) -> None:
    done = nodes.run_inside("launch", "four.json", "--steps", "3", "--min-pipelines", "2", code=2)
    assert "add --elastic" in " ".join(done.stderr.split())


MORE_STEPS, JOIN_STEPS = 400, 240


def calm_losses(nodes: Any, steps: int) -> list[float]:
    """Of a longer run that nothing happens to."""
    calm = ("--steps", str(steps), "--elastic", "--checkpoint-every", "0", "--json")
    return losses_of(nodes.run_inside("launch", "four.json", *calm, code=0))


@pytest.fixture(scope="module")
def more_losses(nodes: Any) -> list[float]:
    return calm_losses(nodes, MORE_STEPS)


def launch_long(nodes: Any, plan: str = "three", *words: str, steps: int = MORE_STEPS) -> Run:
    length = ("--steps", str(steps), "--checkpoint-every", "50")
    run: Run = nodes.launch(f"{plan}.json", *length, "--elastic", *words)
    return run


def ends_alike(run: Run, losses: list[float]) -> str:
    """It ends in one attempt, with these losses to the last bit; what it said."""
    err = run.end().stderr
    run.is_as(losses, 1)
    assert [step["loss"] for step in run.steps] == losses
    assert left_of_state(run.skyctl.state) == []
    return " ".join(err.split())


@pytest.mark.slow
def test_a_node_that_joins_enters_the_attempt(nodes: Any) -> None:
    run = launch_long(nodes, "three", "--encrypt", steps=JOIN_STEPS).wait_for(5)
    nodes.run_inside("join", run.id, "d", code=0)
    err = ends_alike(run, calm_losses(nodes, JOIN_STEPS))
    assert "node d has joined: it enters at step" in err
    assert re.search(r"entered in step \d+: rank 3 on d/cpu:0 \(node d\); 4 make it now", err), err
    entered = run.state["attempts"][0]["devices"][3:]
    assert set(entered) == {"d/cpu:0"}, err  # on a busy machine it may be lost once, and come again


@pytest.mark.matrix
@pytest.mark.parametrize("part", ["rank", "agent", "first", "frozen"])
def test_a_node_that_was_lost_enters_again(nodes: Any, more_losses: list[float], part: str) -> None:
    run = launch_long(nodes, "four").wait_for(13)
    node = "a" if part == "first" else "b"
    pid = run.agent(node) if part == "agent" else run.rank(node)
    os.kill(pid, signal.SIGSTOP if part == "frozen" else signal.SIGKILL)
    err = ends_alike(run, more_losses)
    assert re.search(rf"entered in step \d+: rank 4 on {node}/cpu:0", err), err


@pytest.mark.matrix
def test_a_whole_node_stands_still_and_enters_again(nodes: Any, more_losses: list[float]) -> None:
    """It is given up meanwhile; its old rank has ended, and its session goes on."""
    run = launch_long(nodes, "four").wait_for(13)
    stopped = [run.agent("b"), run.rank("b")]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    run.until(lambda: "b" in run.state["lost"])
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    err = ends_alike(run, more_losses)
    assert re.search(r"entered in step \d+: rank 4 on b/cpu:0", err), err


@pytest.mark.matrix
def test_nodes_come_and_go(nodes: Any, more_losses: list[float]) -> None:
    run = launch_long(nodes, "four").wait_for(13)
    draw = random.Random(5)
    for _ in range(5):
        run.more(draw.randint(40, 60))
        for pid in run.processes(draw.choice("abcd"), "skyctl.worker.rank"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    err = ends_alike(run, more_losses)
    assert err.count("entered in step") >= 2, err


@pytest.mark.matrix
def test_a_run_is_stopped_as_a_rank_enters_and_is_resumed(nodes: Any, more_losses: list[float]) -> None:
    run = launch_long(nodes).wait_for(5)
    nodes.run_inside("join", run.id, "d", code=0)
    run.rank("d")
    nodes.run_inside("stop", run.id, code=0)
    run.end(130)
    run.is_stopped()
    assert left_of_state(nodes.state) == []
    nodes.run_inside("launch", "--resume", run.id, code=0)
    assert len(run.steps) == MORE_STEPS
    run.loses(run.steps, more_losses)


@pytest.mark.matrix
def test_a_rank_is_killed_as_it_enters_and_tries_again(nodes: Any, more_losses: list[float]) -> None:
    run = launch_long(nodes).wait_for(5)
    nodes.run_inside("join", run.id, "d", code=0)
    os.kill(run.rank("d"), signal.SIGKILL)
    err = ends_alike(run, more_losses)
    assert "d/cpu:0 could not enter" in err
    assert re.search(r"entered in step \d+: rank 4 on d/cpu:0", err), err


@pytest.mark.matrix
def test_who_takes_the_run_over_has_the_ranks_that_entered(nodes: Any, more_losses: list[float]) -> None:
    run = launch_long(nodes).wait_for(5)
    nodes.run_inside("join", run.id, "d", code=0)
    run.until(lambda: "entered in step" in (run.folder / "supervisor.log").read_text())
    os.kill(run.child.process.pid, signal.SIGKILL)
    run.child.process.wait()
    run.attach()
    ends_alike(run, more_losses)
