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
from skyctl.turns.turn_messages import ListedJob, ListedMessage

from ..helpers.processes import after_a_moment, left_of_state, until
from ..helpers.runs import Run, losses_of

STEPS, MANY_STEPS, BEFORE = 50, 200, 4
"""Of a run, and how many it makes before its data waits until others have come."""
LONGEST_WAIT_S = 1.0
SIZES = ("--batch-size", "8", "--microbatches", "4")
TRAIN = """\
import os
import time
from pathlib import Path

import torch
from torch import nn

GATE = Path(os.environ["FAULT"] + ".gate")


class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        time.sleep(0.003)
        return self.linear(x)


def model():
    return [*(Slow() for _ in range(6)), nn.Linear(8, 3)]


def data(batch_size, seed):
    generator = torch.Generator().manual_seed(seed)
    count = 0
    while True:
        while count >= BEFORE and not GATE.exists():
            time.sleep(0.01)
        count += 1
        yield (
            torch.randn(batch_size, 8, generator=generator),
            torch.randint(3, (batch_size,), generator=generator),
        )
""".replace("BEFORE", str(BEFORE))
SCRIPT_STEPS = 20
SCRIPT = """\
import json
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for step in range(SCRIPT_STEPS):
    while step >= BEFORE and not os.path.exists(os.environ["FAULT"] + ".gate"):
        time.sleep(0.01)
    optimizer.zero_grad()
    loss = model(torch.randn(16, 8)).square().mean()
    loss.backward()
    optimizer.step()
    dist.all_reduce(loss.detach())
    print(json.dumps([step, dist.get_rank(), loss.item().hex()]))
dist.destroy_process_group()
""".replace("BEFORE", str(BEFORE)).replace("SCRIPT_STEPS", str(SCRIPT_STEPS))
PLANS = {
    "there": ("--assign", "a=0:2,b=2:4,c=4:7"),
    "back": ("--assign", "c=0:2,b=2:4,a=4:7"),
    "data": ("--parallel", "data", "--assign", "a=2,b=1,c=1"),
}


def gate(nodes: Any) -> Path:
    """While it is there, no data waits."""
    return Path(f"{nodes.fault}.gate")


@pytest.fixture(scope="module")
def nodes(another: Callable[..., Any]) -> Any:
    """Three nodes, and plans that use all of them."""
    made = another("a", "b", "c")
    made.train(TRAIN)
    gate(made).touch()
    made.probe_briefly("train.py", *SIZES, "--links", "none")
    for name, form in PLANS.items():
        made.run_inside("plan", "train.py", *SIZES, *form, "-o", f"{name}.json")
    return made


@pytest.fixture(autouse=True)
def _ends(nodes: Any) -> Iterator[None]:
    yield
    nodes.end()
    gate(nodes).touch()


@pytest.fixture(scope="module")
def alone(nodes: Any) -> dict[str, list[float]]:
    """By plan, the losses of a run that shares nothing."""
    return {
        name: losses_of(nodes.run_inside("launch", f"{name}.json", "--steps", str(STEPS), "--json", code=0))
        for name in PLANS
    }


def launch(nodes: Any, plan: str, turns: str = "fair", *words: str, steps: int = STEPS) -> Run:
    run: Run = nodes.launch(f"{plan}.json", "--steps", str(steps), "--turns", turns, *words)
    return run


def losses(run: Run) -> list[float]:
    return [step["loss"] for step in run.steps]


def shared_devices(nodes: Any) -> list[ListedMessage]:
    return list_shared_devices(Path(nodes.env["XDG_CACHE_HOME"]) / "skyctl")


def launch_two(nodes: Any, first: str, second: str, turns: str = "fair", steps: int = STEPS) -> list[Run]:
    """Two runs that compute on all nodes; neither ends before both do. The second finds the first there."""
    gate(nodes).unlink()
    more = ("--checkpoint-every", "10")
    runs = [launch(nodes, name, turns, *more, steps=steps).wait_for(BEFORE - 1) for name in (first, second)]
    shared = shared_devices(nodes)
    assert [listed.device for listed in shared] == ["a/cpu:0", "b/cpu:0", "c/cpu:0"]
    for listed in shared:
        assert {job.job for job in listed.jobs} == {run.id for run in runs}
        assert all(job.turns > 0 and job.used_s > 0.0 for job in listed.jobs)
    return runs


@pytest.mark.slow
@pytest.mark.parametrize(("first", "turns"), [("there", "fair"), ("data", "srtf")])
def test_runs_that_share_all_nodes(nodes: Any, alone: dict[str, list[float]], first: str, turns: str) -> None:
    runs = launch_two(nodes, first, "back", turns)
    gate(nodes).touch()
    told = [run.end() for run in runs]
    assert f"by turns ({turns}) with {runs[0].id} a step is predicted to take" in told[1].stderr
    for run, ended in zip(runs, told, strict=True):
        assert (f"next to {runs[0].id} a step was predicted to take" in ended.stdout) == (run is runs[1])
    for run, name in zip(runs, (first, "back"), strict=True):
        assert losses(run) == alone[name]
    assert left_of_state(nodes.state) == []
    assert not after_a_moment(lambda: shared_devices(nodes))


@pytest.mark.slow
@pytest.mark.parametrize("node", ["a", pytest.param("b", marks=pytest.mark.matrix)])
def test_one_is_killed_and_the_other_goes_on(nodes: Any, alone: dict[str, list[float]], node: str) -> None:
    other, killed = launch_two(nodes, "there", "back")
    gate(nodes).touch()
    killed.wait_for(BEFORE + 2)
    os.kill(killed.rank(node), signal.SIGKILL)
    for run, name in ((other, "there"), (killed, "back")):
        run.end()
        assert losses(run) == alone[name]
    assert [len(run.state["attempts"]) for run in (other, killed)] == [1, 2]
    assert left_of_state(nodes.state) == []


@pytest.mark.slow
def test_others_go_on_beside_a_run_that_is_stopped(nodes: Any, alone: dict[str, list[float]]) -> None:
    stopped, other = launch_two(nodes, "there", "back", steps=MANY_STEPS)
    gate(nodes).touch()
    rank = stopped.wait_for(BEFORE + 2).rank("b")
    launcher = stopped.child.process.pid

    def has_the_turn() -> bool:
        os.kill(rank, signal.SIGSTOP)
        if all(holds_b() for _ in range(2)):  # the first may be of before what it said last
            return True
        os.kill(rank, signal.SIGCONT)
        return False

    def holds_b() -> bool:
        [jobs] = [listed.jobs for listed in shared_devices(nodes) if listed.device == "b/cpu:0"]
        return any(job.holds for job in jobs if job.job == stopped.id)

    stopped.until(has_the_turn)
    os.kill(launcher, signal.SIGSTOP)  # else it gives up the rank after ten seconds, and nobody is late
    other.until(lambda: any(job.is_late for job in jobs_of(nodes, stopped)))
    other.more(5)
    gate(nodes).unlink()
    is_told = f"b/cpu:0 (fair): {stopped.id} is late"
    until(lambda: is_told in nodes.run_inside("ps", code=0).stdout)
    for pid in (rank, launcher):
        os.kill(pid, signal.SIGCONT)
    gate(nodes).touch()
    for run, name in ((stopped, "there"), (other, "back")):
        run.end()
        assert losses(run)[:STEPS] == alone[name]
    assert [len(run.state["attempts"]) for run in (stopped, other)] == [1, 1]
    assert left_of_state(nodes.state) == []


@pytest.mark.matrix
@pytest.mark.parametrize("number", [0, 1])
def test_a_kill_keeps_the_other_from_no_turn(nodes: Any, alone: dict[str, list[float]], number: int) -> None:
    """Pipelines in opposite order; how long the other has waited for any turn is the arbiters' figure."""
    runs = launch_two(nodes, "there", "back", steps=MANY_STEPS)
    killed, other = runs[number], runs[1 - number]
    gate(nodes).touch()
    killed.wait_for(STEPS // 2)
    os.kill(killed.rank("b"), signal.SIGKILL)
    other.more(10)
    gate(nodes).unlink()  # neither ends before both compute again
    killed.begins(2).until(lambda: len(jobs_of(nodes, killed)) == 3)
    gate(nodes).touch()
    killed.more(10)
    gate(nodes).unlink()
    waits = [job.longest_wait_s for job in jobs_of(nodes, other)]
    gate(nodes).touch()
    assert len(waits) == 3
    assert 0.0 < max(waits) <= LONGEST_WAIT_S
    for run, name in zip(runs, ("there", "back"), strict=True):
        run.end()
        assert losses(run)[:STEPS] == alone[name]
    assert [len(run.state["attempts"]) for run in (other, killed)] == [1, 2]
    assert left_of_state(nodes.state) == []


def jobs_of(nodes: Any, run: Run) -> list[ListedJob]:
    """The jobs of the run's ranks, with what they have had of the devices."""
    return [job for listed in shared_devices(nodes) for job in listed.jobs if job.job == run.id]


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
    gate(nodes).unlink()
    first = launch(nodes, "crowded-there").wait_for(1)
    second = launch(nodes, "crowded-back")
    listed = second.until(lambda: [job for d in shared_devices(nodes) for job in d.jobs if job.place])
    assert [(job.job, job.place) for job in listed] == [(second.id, 1)], "only one rank asks at a time"
    assert not second.steps
    gate(nodes).touch()
    first.end()
    err = second.end().stderr
    assert "on a/cpu:0 (node a) waits for memory that other runs hold, as number 1" in err
    assert losses(second) == alone["back"]
    assert left_of_state(nodes.state) == []


@pytest.mark.slow
def test_a_script_of_several_ranks_beside_a_pipeline(nodes: Any, alone: dict[str, list[float]]) -> None:
    """Its ranks wait for each other in DDP's sums and broadcasts, and hold no turn meanwhile."""
    (nodes.folder / "ddp.py").write_text(SCRIPT)

    def printed(text: str) -> list[str]:
        return sorted(line.partition("] ")[2] for line in text.splitlines() if line.startswith("["))

    expected = printed(nodes.run("run", "ddp.py", code=0).stdout)
    assert len(expected) == 3 * SCRIPT_STEPS
    gate(nodes).unlink()
    script = nodes.start("run", "--turns", "fair", "ddp.py")
    until(lambda: len(printed(script.out)) == 3 * BEFORE, lambda: script.text)
    run = launch(nodes, "there").wait_for(BEFORE - 1)
    shared = shared_devices(nodes)
    assert [listed.device for listed in shared] == ["a/cpu:0", "b/cpu:0", "c/cpu:0"]
    assert all(len({job.job for job in listed.jobs}) == 2 for listed in shared)
    gate(nodes).touch()
    assert printed(script.end().stdout) == expected
    told = run.end().stderr
    assert "it is not known what a step takes while they run" in told
    assert losses(run) == alone["there"]
    assert not after_a_moment(lambda: shared_devices(nodes))


@pytest.mark.slow
def test_another_policy_is_refused(nodes: Any) -> None:
    gate(nodes).unlink()
    first = launch(nodes, "there").wait_for(1)
    done = nodes.run("launch", "back.json", "--turns", "fifo", "--json")
    assert done.returncode == 5, done.stderr
    assert "turns 'fair'" in done.stderr
    gate(nodes).touch()
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
    runs = launch_two(nodes, "there", "back")

    def shared_told() -> list[dict[str, Any]]:
        told: list[dict[str, Any]] = json.loads(nodes.run_inside("ps", "--json", code=0).stdout)["shared"]
        return told

    # on a busy machine a node may not answer at once
    told = until(lambda: found if len(found := shared_told()) == 3 else None)
    assert [(one["device"], one["turns"]) for one in told] == [(f"{name}/cpu:0", "fair") for name in "abc"]
    for device in told:
        assert {job["job"] for job in device["jobs"]} == {run.id for run in runs}
    planned = nodes.run_inside("plan", "train.py", *SIZES, *PLANS["there"], "--json", code=0)
    document = json.loads(planned.stdout)
    shared = document["shared_step"]
    assert (shared["turns"], shared["beside"]) == ("fair", [run.id for run in reversed(runs)])
    assert shared["step_s"] > shared["alone_s"] == document["predicted"]["iteration_s"]
    assert f"by turns (fair) with {runs[1].id}, {runs[0].id} a step is predicted to take" in planned.stderr
    (nodes.folder / "printed.json").write_text(planned.stdout)
    nodes.run_inside("verify", "printed.json", code=0)
    assert "b/cpu:0 (fair): " in nodes.run_inside("ps", code=0).stdout
    assert json.loads(nodes.run_inside("ps", "--offline", "--json", code=0).stdout)["shared"] == []
    gate(nodes).touch()
    for run in runs:
        run.end()
    assert not after_a_moment(shared_told)
