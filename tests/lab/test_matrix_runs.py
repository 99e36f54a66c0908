"""Faults of launchers, agents and ranks, over real SSH: every run ends as docs/faults.md says, and
nothing of it is left on any node.

The runs of a test are ended by the test; what is left then, here or there, fails it.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ..helpers import runs
from ..helpers.processes import until
from . import harm
from .clusters import Cluster

pytestmark = pytest.mark.matrix
NODES = ("n1", "n2", "n3")
SPEC = {"nodes": [{"name": name, "cpus": 0.66, "memory_gib": 1} for name in NODES]}
EVERY = ("--ignore-changes", "--checkpoint-every", "5", "--steps")
SHORT = (*EVERY, "40")
MEDIUM = (*EVERY, "120")
LONG = (*EVERY, "100000")


@pytest.fixture(scope="module")
def shared_cluster(planned_cluster: Callable[..., Cluster]) -> Cluster:
    return planned_cluster(SPEC, "runs", sleep_s=0.004, layers=6)


@pytest.fixture(scope="module")
def losses(shared_cluster: Cluster) -> list[float]:
    return shared_cluster.losses(120, "--ignore-changes")


@pytest.fixture
def lab3(shared_cluster: Cluster) -> Iterator[Cluster]:
    """The cluster. Afterwards nothing is left in it but checkpoints of runs that were stopped."""
    try:
        yield shared_cluster
        assert shared_cluster.settled(checkpoints=False) == {}
    finally:
        if shared_cluster.left(checkpoints=False) or runs.left_behind(shared_cluster):
            shared_cluster.run("stop", "--all", "--now", code=None)
        shared_cluster.end()


def ps(cluster: Cluster, *words: str) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = json.loads(cluster.run("ps", "--json", *words).stdout)["runs"]
    return listed


# --- the launcher


def test_ctrl_c_keeps_a_checkpoint_from_which_it_goes_on(lab3: Cluster, losses: list[float]) -> None:
    run = lab3.launch(*SHORT).wait_for(7)
    run.child.interrupt()
    assert f"skyctl launch --resume {run.id}" in run.end(130).stderr
    run.is_stopped()
    assert lab3.settled(checkpoints=False) == {}
    lab3.run("launch", "--resume", run.id)
    run.is_as(losses, 2)


def test_ctrl_c_many_times(lab3: Cluster) -> None:
    run = lab3.launch(*LONG).wait_for(3)
    for _ in range(12):
        if run.child.process.poll() is None:
            run.child.interrupt()
        time.sleep(0.1)
    run.end(130)
    run.is_stopped(kept=False)


def test_ctrl_c_before_there_is_a_step(lab3: Cluster) -> None:
    run = lab3.launch(*LONG)
    until(lambda: run.state["sessions"])
    run.child.interrupt()
    run.end(130)
    run.is_stopped(kept=False)


def test_ctrl_c_at_a_terminal_asks_and_a_second_one_stops(lab3: Cluster) -> None:
    run = lab3.launch(*LONG, terminal=True).wait_for(3)
    run.child.types("\x03", answered="(s)top the run")
    run.child.types("g\n")
    run.more(3)
    run.child.types("\x03", answered="(s)top the run")
    run.child.types("\x03")
    run.end(130)
    run.is_stopped()


def test_sigterm_to_launch_stops(lab3: Cluster) -> None:
    run = lab3.launch(*LONG).wait_for(3)
    run.child.process.terminate()
    run.end(143)
    run.is_stopped(kept=False)


def test_launch_is_killed_and_attach_goes_on(lab3: Cluster, losses: list[float]) -> None:
    run = lab3.launch(*SHORT).wait_for(7)
    run.child.kill()
    lab3.run("attach", run.id)
    run.is_as(losses, 1)


def test_the_background_is_told_to_end_and_attach_goes_on(lab3: Cluster, losses: list[float]) -> None:
    run = lab3.launch(*MEDIUM, "--detach")
    run.end(0)
    os.kill(run.state["supervisor"]["pid"], signal.SIGTERM)
    until(lambda: run.state["supervisor"] is None)
    lab3.run("attach", run.id)
    run.is_as(losses, 1)


def test_the_background_is_killed_and_ps_and_stop_know(lab3: Cluster) -> None:
    run = lab3.launch(*LONG, "--detach")
    run.end(0)
    os.kill(run.state["supervisor"]["pid"], signal.SIGKILL)
    (seen,) = [entry for entry in ps(lab3) if entry["run_id"] == run.id]
    assert (seen["status"], seen["supervised"]) == ("unsupervised", "gone")
    assert seen["detail"] == "ranks on 3 of 3 nodes go on"
    lab3.run("stop", run.id)
    run.is_stopped()
    assert lab3.settled(checkpoints=False) == {}
    assert ps(lab3, "--offline")[0]["status"] == "stopped"


# --- agents and ranks


def test_an_agent_is_killed_and_its_node_left_out(lab3: Cluster, losses: list[float]) -> None:
    run = lab3.launch(*MEDIUM).wait_for(12)
    run.until(lambda: lab3.whole_without(run, "n3"))
    os.kill(run.agent("n3"), signal.SIGKILL)
    assert "node n3 was lost" in run.end().stderr
    run.is_as(losses, 2)
    second = run.state["attempts"][1]
    assert (second["why"], second["from_step"] >= 5) == ("node n3 was lost", True)
    assert set(second["devices"]) <= {"n1/cpu:0", "n2/cpu:0"}


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("SIGKILL", "ended by SIGKILL"),
        ("segfault", "ended by SIGSEGV"),
        ("memory", "ended by SIGKILL"),
        ("SIGSTOP", "has stalled: its node answers"),
    ],
)
def test_a_rank_ends_or_stops(lab3: Cluster, losses: list[float], fault: str, words: str) -> None:
    kills = harm.short_of_memory(lab3.lab, "n2")
    run = lab3.launch(*SHORT).wait_for(12)
    lab3.at_home("n2", "fault", fault)
    printed = run.end().stderr
    assert "rank 1 on n2/cpu:0 (node n2" in printed
    assert words in printed
    run.is_as(losses, 2)
    assert harm.short_of_memory(lab3.lab, "n2") - kills == (1 if fault == "memory" else 0)
    first, second = run.state["attempts"]
    assert second["devices"] == first["devices"]
    assert second["from_step"] >= 5


def test_it_ignores_sigterm_and_leaves_children_behind(lab3: Cluster, losses: list[float]) -> None:
    for node in lab3.nodes:
        lab3.at_home(node, "habits", "ignores SIGTERM, has children")
    run = lab3.launch(*LONG).wait_for(12)
    there = [text for node in NODES for text in harm.strays(lab3.lab, node).values()]
    assert sum("sleep 400" in text for text in there) == 4  # on the first node, and on the last
    os.kill(run.rank("n1"), signal.SIGKILL)
    until(lambda: len(run.state["attempts"]) == 2 and run.state["status"] == "running", run.told)
    run.more(3).loses(run.steps[: len(losses)], losses)
    lab3.run("stop", "--now", run.id)
    run.end(130)
    run.is_stopped(kept=False)


# --- clusters


def test_of_two_runs_on_the_same_nodes_one_is_stopped(lab3: Cluster, losses: list[float]) -> None:
    stopped = lab3.launch(*LONG).wait_for(3)
    other = lab3.launch(*SHORT).wait_for(3)
    lab3.run("stop", stopped.id)
    stopped.end(130)
    stopped.is_stopped()
    other.end()
    other.is_as(losses, 1)


def test_one_node_never_starts(lab3: Cluster) -> None:
    harm.stop_sshd(lab3.lab, "n3")
    try:
        done = lab3.run("launch", "plan.json", *SHORT, code=4)
        assert "n3" in done.stderr
        assert done.stderr.count("error:") == 1
        assert lab3.settled(checkpoints=False) == {}
    finally:
        harm.switch_on(lab3.lab, "n3")
    run = lab3.launch(*LONG).wait_for(1)
    run.child.interrupt()
    run.end(130)
