"""Runs that survive on a small cluster of this machine's processes: what fails is tried again, and the losses
are those of a run that nothing happened to."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

GPT = "gpt:layers=2,hidden=16,heads=2,context=16"
SIZES = ("--batch-size", "8", "--microbatches", "4")
STEPS = 40
SLOWER = 40.0
EVERY = ("--checkpoint-every", "5")


class Run:
    """A launch under way, and its folder."""

    def __init__(self, here, *words: str) -> None:
        self.here = here
        before = set((here.state / "runs").glob("*"))
        self.child: subprocess.Popen[str] = here.start("launch", *words)
        self._before = before
        self.folder = Path()

    def wait_for(self, step: int) -> Run:
        """Until it has done so many steps."""
        self.until(lambda: len((self.folder / "metrics.jsonl").read_text().splitlines()) >= step)
        return self

    def until(self, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 100
        while time.monotonic() < deadline:
            if self.folder == Path():
                new = set((self.here.state / "runs").glob("*")) - self._before
                self.folder = new.pop() if new else Path()
            try:
                if self.folder != Path() and happened():
                    return
            except (OSError, ValueError, KeyError):
                pass
            assert self.child.poll() is None, self.child.communicate()
            time.sleep(0.01)
        raise AssertionError("it did not happen")

    @property
    def state(self) -> dict:
        return json.loads((self.folder / "state.json").read_text())

    def processes(self, node: str, name: str) -> list[int]:
        """Processes of the run's tasks on that node whose command has ``name`` in it."""
        session = next(s["session"] for s in self.state["sessions"] if s["node"] == node)
        tag = f"SKYCTL_TASK={session}/".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                tagged = any(v.startswith(tag) for v in (entry / "environ").read_bytes().split(b"\0"))
                if tagged and name.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    def agent(self, node: str) -> int:
        (rank,) = self.processes(node, "worker.rank")
        return int(Path(f"/proc/{rank}/stat").read_bytes().rpartition(b")")[2].split()[1])

    def end(self, code: int = 0) -> tuple[str, str]:
        out, err = self.child.communicate(timeout=120)
        assert self.child.returncode == code, err + out
        assert "Traceback" not in err
        return out, err


def left_of(state: Path) -> list[int]:
    """Processes started with this state folder, once what is ending has had a moment."""
    mark = f"SKYCTL_HOME={state}".encode()
    deadline = time.monotonic() + 10
    while True:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    if mark in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
                except OSError:
                    continue
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def kept(run: Run) -> list[str]:
    """The folders of its checkpoints on the nodes (all of them share one cache)."""
    runs = Path(run.here.env["XDG_CACHE_HOME"]) / "skyctl" / "runs"
    return sorted(entry.name for entry in runs.glob(f"{run.folder.name}@*"))


@pytest.fixture(scope="module")
def three(another: Callable):
    """Three nodes, and a plan that uses all of them."""
    made = another("a", "b", "c")
    file = made.folder / "cluster.yaml"  # else a run is over before anything can happen to it
    file.write_text(file.read_text().replace("transport: local", f"transport: local, slowdown: {SLOWER}"))
    done = made.run("probe", GPT, *SIZES, "--links", "none")
    assert done.returncode == 0, done.stderr
    done = made.run("plan", GPT, *SIZES, "--assign", "a=0:2,b=2:4,c=4:6", "-o", "plan.json")
    assert done.returncode == 0, done.stderr
    return made


@pytest.fixture(scope="module")
def losses(three) -> list[float]:
    """Of a run that nothing happens to, and that writes no checkpoints."""
    done = three.run("launch", "plan.json", "--steps", str(STEPS), "--checkpoint-every", "0", "--json")
    assert done.returncode == 0, done.stderr
    return [step["loss"] for step in json.loads(done.stdout)["steps"]]


@pytest.fixture(autouse=True)
def _ends(three) -> Iterator[None]:
    """A test that fails half-way leaves no run behind."""
    yield
    three.end()


def check(out: str, losses: list[float], attempts: int) -> dict:
    done = json.loads(out)
    assert [step["step"] for step in done["steps"]] == list(range(STEPS))
    assert [step["loss"] for step in done["steps"]] == pytest.approx(losses, rel=1e-5)
    assert done["attempts"] == attempts
    return done


def launch(three, *words: str) -> Run:
    return Run(three, "plan.json", "--steps", str(STEPS), *EVERY, "--json", *words)


def test_nothing_happens_and_nothing_is_left(three, losses: list[float]) -> None:
    run = launch(three, "--keep-here").wait_for(STEPS - 1)
    out, _ = run.end()
    check(out, losses, 1)
    state = run.state
    assert (state["status"], state["step"], state["checkpoint"]) == ("done", STEPS, STEPS)
    assert kept(run) == []
    assert left_of(three.state) == []
    steps = sorted(p.name for p in (run.folder / "checkpoints").glob("step-*"))
    assert steps
    assert set(steps) <= {f"step-{step:08d}" for step in range(5, STEPS + 1, 5)}


def test_a_rank_is_killed(three, losses: list[float]) -> None:
    run = launch(three).wait_for(13)
    for pid in run.processes("b", "worker.rank"):
        os.kill(pid, signal.SIGKILL)
    out, err = run.end()
    check(out, losses, 2)
    assert "rank 1 on b/cpu:0 (node b, 127.0.0.1) failed" in err
    assert "ended by SIGKILL" in err
    assert "going on from step" in err
    first, second = run.state["attempts"]
    assert "SIGKILL" in first["error"]
    assert second["from_step"] >= 10
    assert second["devices"] == first["devices"]
    assert kept(run) == []
    assert left_of(three.state) == []


def test_an_agent_is_killed_and_its_node_left_out(three, losses: list[float]) -> None:
    run = launch(three).wait_for(13)
    os.kill(run.agent("c"), signal.SIGKILL)
    out, err = run.end()
    done = check(out, losses, 2)
    assert {replica["device"] for replica in done["replicas"]} <= {"a/cpu:0", "b/cpu:0"}
    assert "node c was lost" in err
    assert run.state["attempts"][1]["why"] == "node c was lost"
    assert left_of(three.state) == []


@pytest.mark.slow
def test_a_rank_is_stopped(three, losses: list[float]) -> None:
    run = launch(three).wait_for(13)
    (pid,) = run.processes("b", "worker.rank")
    os.kill(pid, signal.SIGSTOP)
    out, err = run.end()
    check(out, losses, 2)
    assert "rank 1 on b/cpu:0 (node b) has not been heard for" in err
    assert "rank 1 on b/cpu:0 (node b) has stalled: its node answers" in err
    assert left_of(three.state) == []


def test_ctrl_c_keeps_a_checkpoint_and_a_damaged_one_is_passed_over(three, losses: list[float]) -> None:
    run = launch(three).wait_for(13)
    run.child.send_signal(signal.SIGINT)
    _, err = run.end(130)
    state = run.state
    assert state["status"] == "stopped"
    at = state["checkpoint"]
    assert at >= 13
    assert f"go on from step {at}: skyctl launch --resume {run.folder.name}" in err
    assert left_of(three.state) == []

    listed = three.run("checkpoint", "ls", run.folder.name, "--json")
    assert listed.returncode == 0, listed.stderr
    steps = json.loads(listed.stdout)["steps"]
    assert [one["step"] for one in steps if one["whole"]] == [at, at - at % 5 if at % 5 else at - 5]
    exported = three.run("checkpoint", "export", run.folder.name, "-o", "weights.safetensors")
    assert exported.returncode == 0, exported.stderr
    assert (three.folder / "weights.safetensors").stat().st_size > 1000

    # every copy of one layer of the newest step, on all nodes
    runs = Path(three.env["XDG_CACHE_HOME"]) / "skyctl" / "runs"
    copies = sorted(runs.glob(f"{run.folder.name}@*/step-{at:08d}/layer-00002.safetensors"))
    assert copies
    for copy in copies:
        data = bytearray(copy.read_bytes())
        data[-5] ^= 1
        copy.write_bytes(data)
    done = three.run("launch", "--resume", run.folder.name, "--json")
    assert done.returncode == 0, done.stderr
    assert f"checkpoint of step {at}: node b: step-{at:08d}/layer-00002.safetensors is damaged" in done.stderr
    check(done.stdout, losses, 2)
    assert kept(run) == []
    again = three.run("launch", "--resume", run.folder.name)
    assert again.returncode == 2
    assert "has ended well" in again.stderr


def test_a_crash_loop_ends_and_says_how_to_go_on(three) -> None:
    fault = three.folder / "fault"
    three.train(CRASHING.format(fault=str(fault)))
    done = three.run("probe", "train.py", *SIZES, "--links", "none")
    assert done.returncode == 0, done.stderr
    done = three.run("plan", "train.py", *SIZES, "--assign", "a=0:3,b=3:6", "-o", "crash.json")
    assert done.returncode == 0, done.stderr
    calm = three.run("launch", "crash.json", "--steps", "12", "--json")
    assert calm.returncode == 0, calm.stderr
    fault.write_text("")
    done = three.run(
        "launch", "crash.json", "--steps", "12", "--checkpoint-every", "3", "--max-restarts", "5"
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("error:") == 1
    assert "ValueError: the eighth step" in done.stderr
    assert "it was tried again once only" in done.stderr
    run = re.search(r"--resume (\S+)", done.stderr)
    assert run is not None
    fault.unlink()
    done = three.run("launch", "--resume", run[1], "--json")
    assert done.returncode == 0, done.stderr
    assert [step["loss"] for step in json.loads(done.stdout)["steps"]] == pytest.approx(
        [step["loss"] for step in json.loads(calm.stdout)["steps"]], rel=1e-5
    )
    assert left_of(three.state) == []


def test_too_little_is_left(three, complains: Callable[..., None]) -> None:
    """Two nodes whose memory holds the model only together: one is lost."""
    plan = json.loads((three.folder / "plan.json").read_text())
    needs = {one["device"]: one["memory_bytes"] for one in plan["predicted"]["replicas"]}
    for device in plan["problem"]["devices"]:
        own_bytes = needs[device["id"]] - device["reserved_bytes"]
        device["memory_bytes"] = needs[device["id"]] + 0.2 * own_bytes
    (three.folder / "tight.json").write_text(json.dumps(plan))
    run = Run(three, "tight.json", "--steps", "400", *EVERY, "--ignore-changes").wait_for(8)
    os.kill(run.agent("a"), signal.SIGKILL)
    os.kill(run.agent("c"), signal.SIGKILL)
    out, err = run.child.communicate(timeout=100)
    complains(subprocess.CompletedProcess([], run.child.returncode, out, err), 3, "without", "nothing fits")
    assert left_of(three.state) == []


@pytest.mark.slow
def test_a_node_that_joins_is_used(three) -> None:
    fault = three.folder / "none"
    three.train(CRASHING.format(fault=str(fault)).replace("SLEEP_S = 0.0", "SLEEP_S = 0.01"))
    assert three.run("probe", "train.py", *SIZES, "--links", "none").returncode == 0
    done = three.run("plan", "train.py", *SIZES, "--assign", "a=0:3,b=3:6", "-o", "two.json")
    assert done.returncode == 0, done.stderr
    run = Run(three, "two.json", "--steps", "100000", *EVERY).wait_for(6)
    asked = three.run("join", run.folder.name, "nobody")
    assert asked.returncode == 2
    assert "has no node 'nobody'" in asked.stderr
    asked = three.run("join", run.folder.name, "c")
    assert asked.returncode == 0, asked.stderr

    def with_it() -> list[dict]:  # a step that is slower than predicted may have brought another plan before
        return [one for one in run.state["attempts"] if one["why"] == "node c has joined"]

    run.until(lambda: bool(with_it()) and run.state["status"] == "running")
    (attempt,) = with_it()
    assert attempt["planned"]
    assert "c/cpu:0" in attempt["devices"]
    run.child.send_signal(signal.SIGINT)
    _, err = run.end(130)
    assert "node c has joined" in err
    assert left_of(three.state) == []


CRASHING = """\
import time
from pathlib import Path

import torch
from torch import nn

FAULT = Path({fault!r})
SLEEP_S = 0.0
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
