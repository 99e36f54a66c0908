"""Runs that share nodes by turns: their losses are those alone, and the death of one is not the other's."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from skyctl.turns.turn_client import list_shared_devices
from skyctl.turns.turn_messages import ListedMessage

from ..helpers.processes import after_a_moment, left_of_state
from ..helpers.runs import Run, losses_of
from .test_data_plans import SIZES, TRAIN

STEPS = {"there": 200, "back": 120, "data": 60}
"""The first that is launched has more than the next one, which it is to meet."""
PLANS = {
    "there": ("--assign", "a=0:2,b=2:4,c=4:7"),
    "back": ("--assign", "c=0:2,b=2:4,a=4:7"),
    "data": ("--parallel", "data", "--assign", "a=2,b=1,c=1"),
}


@pytest.fixture(scope="module")
def nodes(another: Callable[..., Any]) -> Any:
    """Three nodes, and plans that use all of them."""
    made = another("a", "b", "c")
    made.train(TRAIN)
    made.probe_briefly("train.py", *SIZES, "--links", "none")
    for name, form in PLANS.items():
        made.run_inside("plan", "train.py", *SIZES, *form, "-o", f"{name}.json")
    return made


@pytest.fixture(autouse=True)
def _ends(nodes: Any) -> Iterator[None]:
    yield
    nodes.end()


@pytest.fixture(scope="module")
def alone(nodes: Any) -> dict[str, list[float]]:
    """By plan, the losses of a run that shares nothing."""
    return {
        name: losses_of(nodes.run_inside("launch", f"{name}.json", "--steps", str(steps), "--json", code=0))
        for name, steps in STEPS.items()
    }


def launch(nodes: Any, plan: str, turns: str = "fair", *words: str) -> Run:
    run: Run = nodes.launch(f"{plan}.json", "--steps", str(STEPS[plan]), "--turns", turns, *words)
    return run


def losses(run: Run) -> list[float]:
    return [step["loss"] for step in run.steps]


def shared_devices(nodes: Any) -> list[ListedMessage]:
    return list_shared_devices(Path(nodes.env["XDG_CACHE_HOME"]) / "skyctl")


def both_share(nodes: Any) -> list[ListedMessage]:
    """The devices as soon as two jobs compute on each of three; empty before."""
    shared = shared_devices(nodes)
    counts = [sum(job.turns > 0 for job in listed.jobs) for listed in shared]
    return shared if counts == [2, 2, 2] else []


@pytest.mark.slow
def test_pipelines_in_opposite_order(nodes: Any, alone: dict[str, list[float]]) -> None:
    runs = {name: launch(nodes, name) for name in ("there", "back")}
    shared = runs["back"].until(lambda: both_share(nodes))
    assert [listed.device for listed in shared] == ["a/cpu:0", "b/cpu:0", "c/cpu:0"]
    assert {job.job for listed in shared for job in listed.jobs} == {run.id for run in runs.values()}
    for name, run in runs.items():
        run.end()
        assert losses(run) == alone[name]
    assert left_of_state(nodes.state) == []
    assert not after_a_moment(lambda: shared_devices(nodes))


@pytest.mark.slow
@pytest.mark.parametrize("node", ["a", pytest.param("b", marks=pytest.mark.matrix)])
def test_one_is_killed_and_the_other_goes_on(nodes: Any, alone: dict[str, list[float]], node: str) -> None:
    killed, other = launch(nodes, "there", "fair", "--checkpoint-every", "5"), launch(nodes, "back")
    other.until(lambda: both_share(nodes))
    os.kill(killed.rank(node), signal.SIGKILL)
    other.more(3)
    for run, name in ((other, "back"), (killed, "there")):
        run.end()
        assert losses(run) == alone[name]
    assert len(other.state["attempts"]) == 1
    assert left_of_state(nodes.state) == []


@pytest.mark.matrix
def test_data_parallel_beside_a_pipeline(nodes: Any, alone: dict[str, list[float]]) -> None:
    runs = {name: launch(nodes, name, "srtf") for name in ("there", "data")}
    for name, run in runs.items():
        run.end()
        assert losses(run) == alone[name]


def crowded(nodes: Any, name: str) -> None:
    """A plan as for devices that have no room for two of its ranks at a time."""
    plan = json.loads((nodes.folder / f"{name}.json").read_text())
    most = max(replica["memory_bytes"] for replica in plan["predicted"]["replicas"])
    for device in plan["problem"]["devices"]:
        device["memory_bytes"] = 1.4 * most
    (nodes.folder / f"crowded-{name}.json").write_text(json.dumps(plan))


@pytest.mark.slow
def test_a_run_that_does_not_fit_waits_and_starts_by_itself(
    nodes: Any, alone: dict[str, list[float]]
) -> None:
    for name in ("there", "back"):
        crowded(nodes, name)
    first = launch(nodes, "crowded-there").wait_for(1)
    second = launch(nodes, "crowded-back")
    listed = second.until(lambda: [job for d in shared_devices(nodes) for job in d.jobs if job.place])
    assert [(job.job, job.place) for job in listed] == [(second.id, 1)], "only one rank asks at a time"
    assert not second.steps
    first.end()
    err = second.end().stderr
    assert "on a/cpu:0 (node a) waits for memory that other runs hold, as number 1" in err
    assert losses(second) == alone["back"]
    assert left_of_state(nodes.state) == []


@pytest.mark.slow
def test_another_policy_is_refused(nodes: Any) -> None:
    first = launch(nodes, "there").wait_for(1)
    done = nodes.run("launch", "back.json", "--turns", "fifo", "--json")
    assert done.returncode == 5, done.stderr
    assert "turns 'fair'" in done.stderr
    first.end()


def test_a_mistyped_policy_is_told_at_once(nodes: Any) -> None:
    done = nodes.run("launch", "there.json", "--turns", "fare")
    assert done.returncode == 2
    assert "needs fifo, fair, srtf, pack or priority=N" in done.stderr


def test_ranks_are_told(nodes: Any) -> None:
    shown = nodes.run_inside("launch", "there.json", "--turns", "priority=7", "--dry-run", "--json", code=0)
    told = [rank["payload"]["turns"] for rank in json.loads(shown.stdout)["ranks"]]
    assert [turns["policy"] for turns in told] == ["priority=7"] * 3
    assert [turns["device"] for turns in told] == [f"{name}/cpu:0" for name in "abc"]
    plan = json.loads((nodes.folder / "there.json").read_text())
    needs = [replica["memory_bytes"] for replica in plan["predicted"]["replicas"]]
    assert [turns["persistent_bytes"] + turns["ephemeral_bytes"] for turns in told] == pytest.approx(needs)


@pytest.mark.slow
def test_ps_shows_who_shares(nodes: Any) -> None:
    runs = [launch(nodes, name) for name in ("there", "back")]
    runs[1].until(lambda: both_share(nodes))
    told = json.loads(nodes.run_inside("ps", "--json", code=0).stdout)
    assert [(one["device"], one["turns"]) for one in told["shared"]] == [
        (f"{name}/cpu:0", "fair") for name in "abc"
    ]
    for device in told["shared"]:
        assert {job["job"] for job in device["jobs"]} == {run.id for run in runs}
        assert all(job["turns"] > 0 and job["used_s"] > 0 for job in device["jobs"])
    offline = json.loads(nodes.run_inside("ps", "--offline", "--json", code=0).stdout)
    assert offline["shared"] == []
    for run in runs:
        run.end()
    told = json.loads(nodes.run_inside("ps", "--json", code=0).stdout)
    assert told["shared"] == []
