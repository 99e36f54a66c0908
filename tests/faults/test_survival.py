"""Runs that survive on a small cluster of this machine's processes: what fails is tried again, and the losses
are those of a run that nothing happened to."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ..helpers.processes import left_of_state
from ..helpers.runs import Run, losses_of

GPT = "gpt:layers=2,hidden=16,heads=2,context=16"
SIZES = ("--batch-size", "8", "--microbatches", "4")
STEPS = 30
LAYERS = 6
SLOWER = 40.0
EVERY = ("--checkpoint-every", "5")


def kept(run: Run) -> list[str]:
    """The steps of its checkpoints that are on any node (all of them share one cache)."""
    runs = Path(run.skyctl.env["XDG_CACHE_HOME"]) / "skyctl" / "runs"
    return sorted({entry.name for entry in runs.glob(f"{run.id}@*/*") if entry.is_dir()})


@pytest.fixture(scope="module")
def three(another: Callable):
    """Three nodes, and a plan that uses all of them."""
    made = another("a", "b", "c")
    file = made.folder / "cluster.yaml"  # else a run is over before anything can happen to it
    file.write_text(file.read_text().replace("transport: local", f"transport: local, slowdown: {SLOWER}"))
    made.probe_briefly(GPT, *SIZES, "--links", "none")
    fixed = ("--assign", "a=0:2,b=2:4,c=4:6", "--schedule", "1f1b")  # so memory is not a matter of timing
    made.run_inside("plan", GPT, *SIZES, *fixed, "-o", "plan.json", code=0)
    return made


@pytest.fixture(scope="module")
def losses(three) -> list[float]:
    """Of a run that nothing happens to, and that writes no checkpoints."""
    calm = ("--steps", str(STEPS), "--checkpoint-every", "0", "--json")
    return losses_of(three.run_inside("launch", "plan.json", *calm, code=0))


@pytest.fixture(scope="module")
def crashing(three) -> Path:
    """``crash.json``: a plan for two of them, for a workload that crashes while the file given is there."""
    fault = three.folder / "fault"
    three.train(CRASHING.format(fault=str(fault)))
    three.probe_briefly("train.py", *SIZES, "--links", "none")
    three.run_inside("plan", "train.py", *SIZES, "--assign", "a=0:3,b=3:6", "-o", "crash.json")
    return fault


@pytest.fixture(autouse=True)
def _ends(three) -> Iterator[None]:
    """A test that fails half-way leaves no run behind."""
    yield
    three.end()


def launch(three, *words: str) -> Run:
    run: Run = three.launch("plan.json", "--steps", str(STEPS), *EVERY, *words)
    return run


@pytest.mark.slow
def test_nothing_happens_and_nothing_is_left(three, losses: list[float]) -> None:
    run = launch(three, "--keep-here").wait_for(STEPS - 1)
    run.end()
    run.is_as(losses, 1)
    state = run.state
    assert (state["status"], state["step"], state["checkpoint"]) == ("done", STEPS, STEPS)
    assert kept(run) == [f"step-{STEPS:08d}"]
    assert left_of_state(three.state) == []
    steps = sorted(p.name for p in (run.folder / "checkpoints").glob("step-*"))
    assert steps
    assert set(steps) <= {f"step-{step:08d}" for step in range(5, STEPS + 1, 5)}


@pytest.mark.slow
def test_a_rank_is_killed(three, losses: list[float]) -> None:
    run = launch(three).wait_for(13)
    os.kill(run.rank("b"), signal.SIGKILL)
    err = run.end().stderr
    run.is_as(losses, 2)
    assert "rank 1 on b/cpu:0 (node b, 127.0.0.1) failed" in err
    assert "ended by SIGKILL" in err
    assert "going on from step" in err
    first, second = run.state["attempts"]
    assert "SIGKILL" in first["error"]
    assert second["from_step"] >= 10
    assert second["devices"] == first["devices"]
    assert kept(run) == [f"step-{STEPS:08d}"]
    assert left_of_state(three.state) == []


@pytest.mark.slow
def test_an_agent_is_killed_and_its_node_left_out(three, losses: list[float]) -> None:
    run = launch(three).wait_for(13)
    os.kill(run.agent("c"), signal.SIGKILL)
    assert "node c was lost" in run.end().stderr
    attempts = run.state["attempts"]
    run.is_as(losses, len(attempts))
    _, second, *later = attempts
    assert second["why"] == "node c was lost"
    assert {one["why"] for one in later} <= {"node c is back"}  # where a run is so slow that this pays
    assert set(second["devices"]) <= {"a/cpu:0", "b/cpu:0"}
    assert left_of_state(three.state) == []


@pytest.mark.slow
def test_a_rank_is_stopped(three, losses: list[float]) -> None:
    run = launch(three).wait_for(13)
    os.kill(run.rank("b"), signal.SIGSTOP)
    err = run.end().stderr
    run.is_as(losses, 2)
    assert "rank 1 on b/cpu:0 (node b) has not been heard for" in err
    assert "rank 1 on b/cpu:0 (node b) has stalled: its node answers" in err
    assert left_of_state(three.state) == []


@pytest.mark.slow
def test_ctrl_c_keeps_a_checkpoint_and_a_damaged_one_is_passed_over(three, losses: list[float]) -> None:
    run = launch(three).wait_for(13)
    run.child.interrupt()
    err = run.end(130).stderr
    state = run.state
    assert state["status"] == "stopped"
    at = state["checkpoint"]
    assert at >= 13
    assert f"go on from step {at}: skyctl launch --resume {run.id}" in err
    assert left_of_state(three.state) == []

    listed = three.run_inside("checkpoint", "ls", run.id, "--json", code=0)
    steps = json.loads(listed.stdout)["steps"]
    whole = [one["step"] for one in steps if one["whole"]]  # or three: copies may be late
    assert whole[:2] == [at, at - at % 5 if at % 5 else at - 5]
    three.run_inside("checkpoint", "export", run.id, "-o", "weights.safetensors", code=0)
    assert (three.folder / "weights.safetensors").stat().st_size > 1000

    # every layer of it is on another node, too
    runs = Path(three.env["XDG_CACHE_HOME"]) / "skyctl" / "runs"
    for layer in range(LAYERS):
        assert len(list(runs.glob(f"{run.id}@*/step-{at:08d}/layer-{layer:05d}.safetensors"))) > 1, err

    # every copy of one layer of the newest step, on all nodes
    copies = sorted(runs.glob(f"{run.id}@*/step-{at:08d}/layer-00002.safetensors"))
    assert copies
    for copy in copies:
        data = bytearray(copy.read_bytes())
        data[-5] ^= 1
        copy.write_bytes(data)
    done = three.run_inside("launch", "--resume", run.id, code=0)
    assert f"checkpoint of step {at}: node b: step-{at:08d}/layer-00002.safetensors is damaged" in done.stderr
    run.is_as(losses, 2)
    assert kept(run) == [f"step-{STEPS:08d}"]
    again = three.run_inside("launch", "--resume", run.id, code=None)
    assert again.returncode == 2
    assert "for how many more is it to go on?" in again.stderr
    assert f"skyctl launch --resume {run.id} --steps MORE" in again.stderr


@pytest.mark.slow
def test_a_crash_loop_ends_and_says_how_to_go_on(three, crashing: Path) -> None:
    calm = losses_of(three.run_inside("launch", "crash.json", "--steps", "12", "--json", code=0))
    crashing.write_text("")
    done = three.run_inside(
        "launch", "crash.json", "--steps", "12", "--checkpoint-every", "3", "--max-restarts", "5", code=None
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("error:") == 1
    assert "ValueError: the eighth step" in done.stderr
    assert "it was tried again once only" in done.stderr
    run = re.search(r"--resume (\S+)", done.stderr)
    assert run is not None
    crashing.unlink()
    done = three.run_inside("launch", "--resume", run[1], "--json", code=0)
    assert losses_of(done) == pytest.approx(calm, rel=1e-5)
    assert left_of_state(three.state) == []


@pytest.mark.slow
def test_too_little_is_left(three, complains: Callable[..., None]) -> None:
    """Two nodes whose memory holds the model only together: one is lost."""
    plan = json.loads((three.folder / "plan.json").read_text())
    needs = {one["device"]: one["memory_bytes"] for one in plan["predicted"]["replicas"]}
    for device in plan["problem"]["devices"]:
        own_bytes = needs[device["id"]] - device["reserved_bytes"]
        device["memory_bytes"] = needs[device["id"]] + 0.2 * own_bytes
    (three.folder / "tight.json").write_text(json.dumps(plan))
    # So few steps that launch does not start anew meanwhile, and connect to both nodes again.
    run = three.launch("tight.json", "--steps", "30", *EVERY, "--ignore-changes").wait_for(8)
    for agent in [run.agent("a"), run.agent("c")]:
        os.kill(agent, signal.SIGKILL)
    complains(run.child.wait(), 3, "without", "nothing fits")
    assert left_of_state(three.state) == []


@pytest.mark.slow
def test_a_node_that_joins_is_used(three, crashing: Path) -> None:
    crashing.unlink(missing_ok=True)
    # Half of what one node does alone: no noise of a short probe makes that not worth a restart.
    three.run_inside("plan", "train.py", *SIZES, "--assign", "a=0:6", "-o", "alone.json")
    run = three.launch("alone.json", "--steps", "100000", *EVERY).wait_for(6)
    asked = three.run_inside("join", run.id, "nobody", code=None)
    assert asked.returncode == 2
    assert "has no node 'nobody'" in asked.stderr
    three.run_inside("join", run.id, "c", code=0)

    run.begins(2)
    run.until(lambda: run.state["status"] == "running")
    attempt = run.state["attempts"][1]
    assert (attempt["why"], attempt["planned"]) == ("node c has joined", True)
    assert "c/cpu:0" in attempt["devices"]
    run.child.interrupt()
    err = run.end(130).stderr
    assert "node c has joined" in err
    assert left_of_state(three.state) == []


CRASHING = """\
import time
from pathlib import Path

import torch
from torch import nn

FAULT = Path({fault!r})
SLEEP_S = 0.01
MARK = 3.0


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        if FAULT.exists() and type(x) is torch.Tensor and (x == MARK).any():
            raise ValueError("the eighth step")
        time.sleep(SLEEP_S)
        return self.linear(x)


def model():
    return [Linear() for _ in range(6)]


def data(batch_size, seed):
    generator = torch.Generator().manual_seed(seed)
    for step in range(10**9):
        inputs = torch.randn(batch_size, 8, generator=generator)
        if step == 7:
            inputs[0, 0] = MARK
        yield inputs, torch.randn(batch_size, 8, generator=generator)


def loss(outputs, targets):
    return ((outputs - targets) ** 2).mean()
"""
