"""Runs without their terminal or their supervisor: they go on, are found again, and end without a trace."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ..helpers.processes import left_of_state, of_state, until
from ..helpers.runs import Run, losses_of

TALKING = """\
import os
import time
from pathlib import Path

import torch
from torch import nn

FAULT = Path(os.environ["FAULT"])


class Talking(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.count = 0

    def forward(self, x):
        if self.training:
            self.count += 1
            print("forward", self.count, flush=True)
        return self.linear(x)


class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        time.sleep(0.05 if FAULT.exists() else 0.002)
        return self.linear(x)


def model():
    return [Talking(), Slow(), Slow(), nn.Linear(8, 3)]


def data(batch_size, seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield (
            torch.randn(batch_size, 8, generator=generator),
            torch.randint(3, (batch_size,), generator=generator),
        )
"""
LONG = ("plan.json", "--steps", "100000", "--ignore-changes")
STEPS = 100


@pytest.fixture(scope="module")
def talking(another: Callable[..., Any]) -> Any:
    """Two nodes, and a plan for a workload that prints what it does."""
    made = another("fast", "slow")
    made.train(TALKING)
    made.plan()
    return made


@pytest.fixture(scope="module")
def losses(talking: Any) -> list[float]:
    """Of a run that nothing happens to."""
    calm = ("plan.json", "--steps", str(STEPS), "--ignore-changes", "--json")
    return losses_of(talking.run_inside("launch", *calm, code=0))


@pytest.fixture
def here(talking: Any) -> Iterator[Any]:
    """While its fault is there, slow layers take so long that a run can be looked at, and hardly computes.

    A test that fails half-way leaves no run behind.
    """
    talking.fault.touch()
    yield talking
    talking.fault.unlink(missing_ok=True)
    if of_state(talking.state):
        talking.run_inside("stop", "--all", "--now", code=None)
    talking.end()


def ps(here: Any, *more: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(here.run_inside("ps", "--json", *more, code=0).stdout)["runs"]
    return found


def of(here: Any, run: Run, *more: str) -> dict[str, Any]:
    """The entry of ``ps`` for that run."""
    (found,) = [one for one in ps(here, *more) if one["run_id"] == run.id]
    return found


def goes_on(here: Any, run: Run) -> None:
    """Its nodes say that it trains, though nobody supervises it; on a busy machine one may not at once."""
    until(lambda: of(here, run)["detail"] == "ranks on 2 of 2 nodes go on", lambda: of(here, run))
    found = of(here, run, "--offline")
    assert (found["status"], found["supervised"]) == ("unsupervised", "gone")


def in_background(here: Any) -> Run:
    """Launched with ``--detach``; it trains."""
    run: Run = here.launch(*LONG, "--detach", "--json")
    assert json.loads(run.end().stdout)["run_id"] == run.id
    return run


@pytest.mark.slow
def test_detached_it_is_listed_shown_and_stopped(here: Any) -> None:
    run = in_background(here)
    found = of(here, run)
    assert (found["status"], found["supervised"]) == ("running", "alive")
    assert found["supervisor"]["attached"] is False
    assert run.id in here.run_inside("ps", code=None).stdout
    printed = run.folder / "logs" / "rank-000.log"  # it may not have printed anything yet
    run.until(lambda: len(printed.read_text().splitlines()) > 3)
    logs = here.run_inside("logs", run.id[-4:], "--rank", "0", "-n", "3")
    assert [line.startswith("forward ") for line in logs.stdout.splitlines()] == [True] * 3
    assert "[0 fast] forward" in here.run_inside("logs", "--rank", "fast").stdout
    here.run_inside("logs", "--rank", "7", code=2)
    assert "training" in here.run_inside("logs", "--supervisor").stdout
    viewer = here.start("attach", run.id[-4:])
    run.until(lambda: "step" in viewer.err)
    viewer.process.terminate()
    viewer.end(143)
    follower = here.start("logs", "-f", "-n", "0", "--rank", "0")
    run.until(lambda: "forward" in follower.out)
    (ended,) = json.loads(here.run_inside("stop", "--json", code=0).stdout)["runs"]
    assert (ended["status"], ended["already"]) == ("stopped", False)
    run.is_stopped()
    assert ended["checkpoint"] == run.state["step"]
    assert follower.end().stdout.startswith("forward ")
    assert left_of_state(here.state) == []
    again = here.run_inside("stop", run.id, code=None)
    assert (again.returncode, "had ended" in again.stdout) == (0, True)


@pytest.mark.slow
def test_a_killed_launcher_is_followed_without_a_gap(here: Any, losses: list[float]) -> None:
    steps = ("plan.json", "--steps", str(STEPS), "--ignore-changes")
    run = here.launch(*steps).wait_for(3)
    run.child.kill()
    goes_on(here, run)
    assert of(here, run, "--offline")["nodes"] is None
    here.fault.unlink()  # it was still at it when it was looked at
    run.attach()
    run.end()
    run.is_as(losses, 1)
    assert len(run.steps) == STEPS
    printed = (run.folder / "logs" / "rank-000.log").read_text().splitlines()
    assert printed == [f"forward {n}" for n in range(1, len(printed) + 1)]
    assert len(printed) >= STEPS
    assert left_of_state(here.state) == []


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), pytest.param(("--now",), marks=pytest.mark.matrix)])
def test_a_killed_launcher_and_then_stop(here: Any, more: tuple[str, ...]) -> None:
    run = here.launch(*LONG).wait_for(3)
    run.child.kill()
    here.run_inside("stop", *more, code=0)
    run.is_stopped(kept=not more)
    assert run.state["supervisor"] is None
    assert left_of_state(here.state) == []
    assert of(here, run)["status"] == "stopped"


@pytest.mark.slow
def test_a_frozen_agent_is_not_forgotten_when_its_node_is_back(here: Any) -> None:
    """The node is reached by another session; what was frozen would hold it for hours once it goes on."""
    run = here.launch(*LONG).wait_for(3)
    run.child.kill()
    run.attach()
    run.more(2)
    frozen = [run.rank("slow"), run.agent("slow")]
    [session] = [one["session"] for one in run.state["sessions"] if one["node"] == "slow"]
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    try:
        run.until(lambda: "node slow is back" in run.child.err)
        run.child.interrupt()
        assert f"could not be told to end session {session}" in run.end(130).stderr
        assert [one["session"] for one in run.state["sessions"]] == [session]
    finally:
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)
    here.run_inside("stop", run.id, code=0)
    run.is_stopped(kept=False)
    assert left_of_state(here.state) == []


@pytest.mark.slow
def test_what_is_gone_from_the_nodes_goes_on_from_its_checkpoint(here: Any, losses: list[float]) -> None:
    steps = ("plan.json", "--steps", "60", "--ignore-changes", "--checkpoint-every", "5")
    run = here.launch(*steps).wait_for(3)
    run.until(lambda: run.state["checkpoint"])
    run.child.kill()
    for pid in of_state(here.state):
        os.kill(pid, signal.SIGKILL)
    assert left_of_state(here.state) == []
    nothing = "nothing of it is left on its nodes"
    until(lambda: of(here, run)["detail"] == nothing, lambda: of(here, run))
    here.fault.unlink()
    run.attach()
    done = run.end()
    assert "from the checkpoint of step" in done.stderr
    measured = json.loads(done.stdout)
    # Steps that nodes had not handed over when killed are gone; the others are as they would have been.
    done_steps = [step["step"] for step in measured["steps"]]
    assert done_steps[-1] == 59
    assert losses_of(done) == pytest.approx([losses[step] for step in done_steps], abs=1e-5)
    assert measured["attempts"] == 2
    assert [line["step"] for line in run.steps] == done_steps
    assert left_of_state(here.state) == []


@pytest.mark.slow
def test_the_terminal_is_closed(here: Any) -> None:
    run = here.launch(*LONG, terminal=True).wait_for(3)
    run.child.hang_up()
    run.end(0)
    found = of(here, run)
    assert (found["status"], found["supervised"]) == ("running", "alive")
    assert found["supervisor"]["pid"] != run.child.process.pid
    run.more(1)
    assert here.run_inside("stop", "--now", code=None).returncode == 0
    assert left_of_state(here.state) == []


@pytest.mark.slow
def test_ctrl_c_at_a_terminal_asks(here: Any) -> None:
    run = here.launch(*LONG, terminal=True).wait_for(3)
    run.child.types("\x03", answered="(s)top the run")
    run.child.types("g\n")
    run.more(4)
    run.child.types("\x03", answered="(s)top the run")
    run.child.types("d\n")
    run.end(0)
    assert of(here, run)["supervised"] == "alive"
    viewer = here.on_terminal("attach")
    run.until(lambda: "step" in viewer.text)
    viewer.types("\x03", answered="(s)top the run")  # else all three may come as one
    for _ in range(2):
        viewer.types("\x03")
        time.sleep(0.3)
    viewer.end(130)
    run.is_stopped(kept=False)
    assert left_of_state(here.state) == []


@pytest.mark.slow
def test_many_ctrl_c_leave_nothing(here: Any) -> None:
    run = here.launch(*LONG).wait_for(3)
    for _ in range(12):
        if run.child.process.poll() is None:
            run.child.interrupt()
        time.sleep(0.1)
    run.end(130)
    run.is_stopped(kept=False)
    assert left_of_state(here.state) == []


@pytest.mark.slow
def test_the_background_is_told_to_end_and_another_takes_over(here: Any) -> None:
    run = in_background(here)
    os.kill(run.state["supervisor"]["pid"], signal.SIGTERM)
    run.until(lambda: run.state["supervisor"] is None)
    goes_on(here, run)
    viewers = [here.start("attach") for _ in range(2)]
    run.more(1)
    for viewer in viewers:
        viewer.interrupt()
    for viewer in viewers:
        viewer.wait()
    run.is_stopped(kept=False)
    assert left_of_state(here.state) == []
