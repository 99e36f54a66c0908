"""What happens to launchers, agents and ranks, over real SSH: every run ends as docs/faults.md says, and
nothing of it is left on any node.

The runs of a test are ended by the test; what is left then, here or there, fails it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from skyctl.lab import inside
from skyctl.lab.state import LabState

from .survival import Cluster, Run, until

pytestmark = pytest.mark.matrix
NODES = ("n1", "n2", "n3")
SPEC = {"nodes": [{"name": name, "cpus": 0.66, "memory_gib": 1} for name in NODES]}
PLAN = ("plan.json", "--ignore-changes", "--checkpoint-every", "5", "--steps")
SHORT = (*PLAN, "40")
MEDIUM = (*PLAN, "120")
LONG = (*PLAN, "100000")


@pytest.fixture(scope="module")
def made(shared_lab: Callable[..., LabState], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(shared_lab(SPEC, name="matrix-runs"), tmp_path_factory.mktemp("matrix"))
    cluster.plan(*NODES)
    yield cluster
    cluster.end()


@pytest.fixture(scope="module")
def losses(made: Cluster) -> list[float]:
    """Of a run that nothing happens to."""
    done = json.loads(made.run("launch", *MEDIUM, "--json").stdout)
    assert done["attempts"] == 1
    return [step["loss"] for step in done["steps"]]


@pytest.fixture
def lab3(made: Cluster) -> Iterator[Cluster]:
    """The cluster. Afterwards nothing is left in it."""
    try:
        yield made
        made.settled()
    finally:
        if made.here() or made.left():
            made.run("stop", "--all", "--now")
        made.end()


# --- the launcher


def test_ctrl_c_keeps_a_checkpoint_from_which_it_goes_on(lab3: Cluster, losses: list[float]) -> None:
    run = lab3.launch(*SHORT).wait_for(7)
    run.process.send_signal(signal.SIGINT)
    assert f"skyctl launch --resume {run.id}" in run.end(130).stderr
    run.is_stopped()
    lab3.settled()
    lab3.run("launch", "--resume", run.id)
    run.is_as(losses, 2)


def test_ctrl_c_many_times(lab3: Cluster) -> None:
    run = lab3.launch(*LONG).wait_for(3)
    for _ in range(12):
        if run.process.poll() is None:
            run.process.send_signal(signal.SIGINT)
        time.sleep(0.1)
    run.end(130)
    run.is_stopped(kept=False)


def test_ctrl_c_before_there_is_a_step(lab3: Cluster) -> None:
    run = lab3.launch(*LONG)
    until(lambda: run.state["sessions"])
    run.process.send_signal(signal.SIGINT)
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
    run.process.terminate()
    run.end(143)
    run.is_stopped(kept=False)


def test_launch_is_killed_and_attach_goes_on(lab3: Cluster, losses: list[float]) -> None:
    run = lab3.launch(*SHORT).wait_for(7)
    run.process.kill()
    run.process.communicate()
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
    (seen,) = [one for one in lab3.ps() if one["run_id"] == run.id]
    assert (seen["status"], seen["supervised"]) == ("unsupervised", "gone")
    assert seen["detail"] == "ranks on 3 of 3 nodes go on"
    lab3.run("stop", run.id)
    run.is_stopped()
    lab3.settled()
    assert lab3.ps("--offline")[0]["status"] == "stopped"


# --- agents and ranks


def test_an_agent_is_killed_and_its_node_left_out(lab3: Cluster, losses: list[float]) -> None:
    run = lab3.launch(*MEDIUM).wait_for(12)
    until(lambda: run.copied("n1", 5) and run.copied("n2", 5))
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
    kills = lab3.short_of_memory("n2")
    run = lab3.launch(*SHORT).wait_for(12)
    lab3.at_home("n2", "fault", fault)
    told = run.end().stderr
    assert "rank 1 on n2/cpu:0 (node n2" in told
    assert words in told
    run.is_as(losses, 2)
    assert lab3.short_of_memory("n2") - kills == (1 if fault == "memory" else 0)
    first, second = run.state["attempts"]
    assert second["devices"] == first["devices"]
    assert second["from_step"] >= 5


def test_it_ignores_sigterm_and_leaves_children_behind(lab3: Cluster, losses: list[float]) -> None:
    for node in lab3.nodes:
        lab3.at_home(node, "habits", "ignores SIGTERM, has children")
    run = lab3.launch(*LONG).wait_for(12)
    assert sum("sleep 400" in one for one in lab3.left()) == 4  # on the first node, and on the last
    os.kill(run.rank("n1"), signal.SIGKILL)
    until(lambda: len(run.state["attempts"]) == 2 and run.state["status"] == "running", run.told)
    run.more(3).loses(run.steps()[: len(losses)], losses)
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
    os.kill(lab3.sshd("n3"), signal.SIGKILL)
    try:
        done = lab3.run("launch", *SHORT, code=4)
        assert "n3" in done.stderr
        assert done.stderr.count("error:") == 1
        lab3.settled()
    finally:
        sshd = shutil.which("sshd") or "/usr/sbin/sshd"
        inside.run(lab3.state, "n3", [sshd, "-f", "/run/skyctl/sshd_config"])
        lab3.own_again("n3")
    run: Run = lab3.launch(*LONG).wait_for(1)
    run.process.send_signal(signal.SIGINT)
    run.end(130)
