"""``launch --expert-hosts`` on a cluster of this machine's processes: losses, a killed host, a takeover."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ..helpers.processes import left_of_state
from ..helpers.runs import Run
from ..worker.test_experts import SOURCE

SIZES = ("--batch-size", "8", "--microbatches", "4")
STEPS = 30
SLOW = SOURCE.replace("        y = x +", "        time.sleep(0.02)\n        y = x +")
PATIENT = """\
import os
import time

if "SKYCTL_SESSION" in os.environ:  # on a busy machine an answer may be late, and its experts would be masked
    from skyctl.experts.host_client import HostClient

    HostClient._limit_s = lambda self, **_: None
"""


@pytest.fixture(scope="module")
def nodes(another: Callable[..., Any]) -> Any:
    """Three nodes, probed, and a plan of two stages that leaves the third out."""
    made = another("a", "b", "c")
    made.train(f"{PATIENT}\n{SLOW}")
    made.probe_briefly("train.py", *SIZES, "--links", "none")
    # experts on hosts do not go with zero-bubble, which a short probe may make the best schedule
    placed = ("--assign", "a=0:2,b=2:4", "--schedule", "1f1b")
    made.run_inside("plan", "train.py", *SIZES, *placed, "-o", "plan.json")
    return made


@pytest.fixture(autouse=True)
def _ends(nodes: Any) -> Iterator[None]:
    """A test that fails half-way leaves no run behind."""
    yield
    nodes.end()


@pytest.fixture(scope="module")
def losses(nodes: Any) -> list[float]:
    """Those of the same run with experts where their layers are."""
    done = nodes.run("launch", "plan.json", "--steps", str(STEPS), "--json", code=0)
    return [step["loss"] for step in json.loads(done.stdout)["steps"]]


def launch(nodes: Any, *words: str, steps: int = STEPS) -> Run:
    found: Run = nodes.launch("plan.json", "--steps", str(steps), "--expert-hosts", "b,c", *words)
    return found


@pytest.mark.slow
def test_losses_are_those_without_hosts_and_it_is_told_who_computed_what(
    nodes: Any, losses: list[float]
) -> None:
    run = launch(nodes, "--encrypt", "--checkpoint-every", "10")
    err = run.end().stderr
    run.is_as(losses, 1)
    assert "an even placement takes" in err, err
    assert "; a step is predicted to take " in err, err
    assert "without any answer: 0; calls failed: 0; steps with experts masked: 0; experts that moved: " in err
    assert run.state["attempts"][0]["expert_hosts"] == ["b/cpu:0", "c/cpu:0"]
    record = json.loads((run.folder / "experts.json").read_text())
    told = record["ranks"]
    assert record["predicted_iteration_s"] > 0
    assert [[*told[rank]["tokens"]] for rank in "01"] == [["1"], ["2"]]
    sent = [by_layer for rank in told.values() for by_layer in rank["hosts"].values()]
    assert sum(sum(by_layer.values()) for by_layer in sent) == STEPS * 8 * 2 * 2
    more = nodes.run("launch", "--resume", run.id, "--steps", "3", "--json", code=0)
    assert "an even placement takes" in more.stderr
    assert left_of_state(nodes.state) == []


@pytest.mark.slow
def test_a_killed_host_is_named_and_the_run_goes_on(nodes: Any, losses: list[float]) -> None:
    run = launch(nodes).wait_for(8)
    (host,) = run.processes("c", "skyctl.worker.experts")
    os.kill(host, signal.SIGKILL)
    err = run.end().stderr
    assert "the host of experts on c/cpu:0 has ended" in err, err
    state = run.state
    assert (state["status"], len(state["attempts"]), len(run.steps)) == ("done", 1, STEPS), run.told()
    assert [step["loss"] for step in run.steps[:8]] == pytest.approx(losses[:8], rel=1e-5)
    told = json.loads((run.folder / "experts.json").read_text())["ranks"]
    for rank in told.values():
        assert [*rank["lost"]] == ["c/cpu:0"]
        assert {move["host"] for move in rank["record"]["moves"]} == {0}
    assert left_of_state(nodes.state) == []


@pytest.mark.slow
def test_a_run_whose_supervisor_is_killed_is_taken_over_with_its_hosts(
    nodes: Any, losses: list[float]
) -> None:
    run = launch(nodes, steps=5 * STEPS).wait_for(5)  # it is to go on until it has been taken over
    hosts = [*run.processes("b", "skyctl.worker.experts"), *run.processes("c", "skyctl.worker.experts")]
    run.child.process.kill()
    run.child.process.wait()
    run.attach()
    run.more()
    assert hosts == [
        *run.processes("b", "skyctl.worker.experts"),
        *run.processes("c", "skyctl.worker.experts"),
    ]
    run.end()
    run.is_as(losses, 1)
    assert (run.folder / "experts.json").exists()
    assert left_of_state(nodes.state) == []


def test_what_can_not_be_is_refused_before_anything_starts(
    nodes: Any, complains: Callable[..., None]
) -> None:
    complains(nodes.run("launch", "plan.json", "--expert-hosts", "d"), 2, "no node matches 'd'")
    elastic = nodes.run("launch", "plan.json", "--expert-hosts", "all", "--clip-norm", "1")
    complains(elastic, 2, "can't be trained with --clip-norm")
    complains(nodes.run("launch", "--resume", "x", "--expert-hosts", "all"), 2)
    none = nodes.run("launch", "gpt:layers=2,hidden=32,heads=2,context=16", "--expert-hosts", "c")
    complains(none, 2, "is or holds skyctl.Experts")
