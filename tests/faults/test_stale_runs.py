"""Runs with a parameter server on a cluster of this machine's processes: planned by what a run showed, a
worker and the root killed, stopped, traced; and what does not go with it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from skyctl.compare.chrome_trace import MEASURED_PID

from ..helpers.processes import left_of_state
from ..helpers.runs import Run

SIZES = ("--batch-size", "8", "--microbatches", "4")
STEPS, EVERY = 40, 5
SHARES = ("--parallel", "data", "--assign", "a=2,b=1,c=1")


@pytest.fixture(scope="module")
def nodes(another: Callable[..., Any]) -> Any:
    """Three nodes, probed, and a plan with a bound of 2."""
    made = another("a", "b", "c")
    made.probe_briefly("train.py", *SIZES, "--links", "none")
    made.run_inside("plan", "train.py", *SIZES, *SHARES, "--staleness", "2", "-o", "stale.json")
    return made


@pytest.fixture(autouse=True)
def _ends(nodes: Any) -> Iterator[None]:
    """A test that fails half-way leaves no run behind."""
    yield
    nodes.end()


def launch(nodes: Any, *words: str, steps: int = STEPS) -> Run:
    found: Run = nodes.launch("stale.json", "--steps", str(steps), "--checkpoint-every", str(EVERY), *words)
    return found


def is_done(run: Run, attempts: int, steps: int = STEPS) -> None:
    """Every step was made once, and the loss went down."""
    state = run.state
    assert (state["status"], len(state["attempts"])) == ("done", attempts), run.told()
    assert [step["step"] for step in run.steps] == list(range(steps)), run.told()
    assert run.steps[-1]["loss"] < 2.0


@pytest.mark.matrix
@pytest.mark.parametrize("seed", [25, 26])
def test_the_root_and_workers_are_killed_at_ten_random_moments(nodes: Any, seed: int) -> None:
    run = launch(nodes, "--max-restarts", "12", steps=4 * STEPS)
    attempts = run.kill_at_random("abc", seed)
    assert attempts > 1
    is_done(run, attempts, 4 * STEPS)
    assert left_of_state(nodes.state) == []


@pytest.mark.slow
@pytest.mark.parametrize("node", ["a", pytest.param("c", marks=pytest.mark.matrix)])
def test_the_root_or_a_worker_is_killed(nodes: Any, node: str) -> None:
    """The root in CI, where a worker's whole node is lost below."""
    run = launch(nodes).wait_for(2 * EVERY + 1)
    os.kill(run.rank(node), signal.SIGKILL)
    err = run.end().stderr
    is_done(run, 2)
    assert f"on {node}/cpu:0 (node {node}" in err
    assert run.state["attempts"][1]["from_step"] >= 2 * EVERY
    plan = json.loads((run.folder / "plan.json").read_text())
    assert plan["problem"]["rhythm"]["staleness"] == 2
    assert left_of_state(nodes.state) == []


@pytest.mark.slow
def test_a_node_is_lost_and_the_others_go_on_with_a_server(nodes: Any) -> None:
    run = launch(nodes).wait_for(2 * EVERY + 1)
    os.kill(run.agent("b"), signal.SIGKILL)
    assert "node b was lost" in run.end().stderr
    is_done(run, 2)
    assert "b/cpu:0" not in run.state["attempts"][1]["devices"]
    assert left_of_state(nodes.state) == []


@pytest.mark.slow
def test_a_stopped_run_has_a_checkpoint_of_one_step_and_goes_on(nodes: Any) -> None:
    run = launch(nodes, steps=2000).wait_for(7)
    [stopped] = json.loads(nodes.run_inside("stop", run.id, "--json", code=0).stdout)["runs"]
    assert stopped["status"] == "stopped"
    run.is_stopped()
    at = run.state["checkpoint"]
    words = ("--resume", run.id, "--steps", "6", "--json")
    done = json.loads(nodes.run_inside("launch", "stale.json", *words, code=0).stdout)
    assert [step["step"] for step in done["steps"]] == list(range(at + 6))
    assert left_of_state(nodes.state) == []


@pytest.mark.slow
def test_what_a_synchronous_run_showed_is_what_staleness_is_predicted_from(nodes: Any) -> None:
    nodes.run_inside("plan", "train.py", *SIZES, *SHARES, "-o", "data.json")
    made = json.loads((nodes.folder / "stale.json").read_text())
    assert sorted(made["predicted"]["stale"]["unknown"]) == ["a/cpu:0", "b/cpu:0", "c/cpu:0"]
    done = json.loads(nodes.run_inside("launch", "data.json", "--steps", "24", "--json", code=0).stdout)
    assert [len(replica["layer_steps_s"]) for replica in done["replicas"]] == [20, 20, 20]
    words = (*SIZES, *SHARES, "--staleness", "async")
    made = json.loads(nodes.run_inside("plan", "train.py", *words, "--json").stdout)
    assert made["predicted"]["stale"].get("unknown", []) == []
    assert all(device["step_factors"] for device in made["problem"]["devices"])
    assert made["problem"]["rhythm"]["staleness"] is None, "as they come"
    (nodes.folder / "async.json").write_text(json.dumps(made))
    nodes.run_inside("verify", "async.json")
    words = ("--steps", "12", "--trace", "--json")
    done = json.loads(nodes.run_inside("launch", "async.json", *words, code=0).stdout)
    assert done["mean_iteration_s"] > 0
    trace = json.loads(Path(done["trace"]).read_text())
    slices = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == MEASURED_PID]
    assert {e["tid"] for e in slices if e["name"] == "summing gradients"} == {1, 2, 3}
    assert left_of_state(nodes.state) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--staleness", "some"), "neither a number of steps nor async"),
        (("--staleness", "2", "--parallel", "pipeline"), "--staleness is about what several pipelines sum"),
        (("--staleness", "2", "--parallel", "hybrid"), "--parallel data"),
        (("--staleness", "2", "--parallel", "data", "--sync", "ring"), "not --sync ring"),
        (("--staleness", "2", "--parallel", "data", "--sync-format", "fixed32"), "not as fixed32"),
        (("--staleness", "2", "--sync-delay", "1"), "contradict each other"),
    ],
)
def test_what_does_not_go_with_it_is_a_clear_error(nodes: Any, words: tuple[str, ...], said: str) -> None:
    done = nodes.run_inside("plan", "train.py", *SIZES, *words, code=2)
    assert said in done.stderr
    assert "Traceback" not in done.stderr
