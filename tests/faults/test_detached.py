"""Runs without their terminal or their supervisor: they go on, are found again, and end without a trace."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

TALKING = """\
import time

import torch
from torch import nn


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
        time.sleep(0.002)
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
PATIENCE_S = 90.0
LONG = ("--steps", "100000", "--ignore-changes")


class Runs:
    """A planned folder of ``Here``, and what the tests ask of runs in it."""

    def __init__(self, here) -> None:
        self.here = here
        self.run = here.run
        self.start = here.start
        self.state = here.state

    def ps(self, *more: str) -> list[dict]:
        done = self.run("ps", "--json", *more)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["runs"]

    def newest(self) -> Path:
        return max((self.state / "runs").iterdir())

    def kept(self) -> dict:
        return json.loads((self.newest() / "state.json").read_text())

    def steps(self) -> list[dict]:
        path = self.newest() / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait(self, ready: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not ready():
            assert time.monotonic() < deadline, f"{what}: {self.told()}"
            time.sleep(0.05)

    def told(self) -> str:
        log = self.newest() / "supervisor.log"
        return log.read_text() if log.exists() else "no supervisor.log"

    def trains(self, runs: int) -> None:
        """Until there are so many runs, and the newest has done some steps."""
        self.wait(lambda: len(list((self.state / "runs").glob("*"))) == runs, "no run")
        self.wait(lambda: len(self.steps()) >= 3, "no step")

    @property
    def count(self) -> int:
        folder = self.state / "runs"
        return len(list(folder.iterdir())) if folder.is_dir() else 0

    def found(self) -> list[int]:
        """Processes that were started with this state folder, ended ones left out."""
        mark = f"SKYCTL_HOME={self.state}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    ended = b") Z " in (entry / "stat").read_bytes()
                    if mark in (entry / "environ").read_bytes().split(b"\0") and not ended:
                        found.append(int(entry.name))
                except OSError:
                    continue
        return found

    def alive(self) -> list[int]:
        """As ``found``, once what is ending has had a moment."""
        deadline = time.monotonic() + 15
        while (found := self.found()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found


@pytest.fixture(scope="module")
def planned_talk(tmp_path_factory: pytest.TempPathFactory, here_in) -> Iterator[Runs]:
    folder = tmp_path_factory.mktemp("talk")
    (folder / "work").mkdir()
    here = here_in(folder / "work", folder / "state")
    here.train(TALKING)
    here.plan()
    yield Runs(here)
    here.end()


@pytest.fixture
def runs(planned_talk: Runs) -> Iterator[Runs]:
    yield planned_talk
    planned_talk.run("stop", "--all", "--now")
    planned_talk.here.end()


def on_terminal(runs: Runs, *arguments: str) -> tuple[subprocess.Popen[bytes], int]:
    """The command on a pseudo-terminal of its own; that is read until it is closed."""
    parent, child = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "skyctl", *arguments],
        cwd=runs.here.folder,
        env={**runs.here.env, "TERM": "dumb"},
        stdin=child,
        stdout=child,
        stderr=child,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 - as a terminal's shell does
    )
    os.close(child)

    def read() -> None:
        try:
            while os.read(parent, 4096):
                pass
        except OSError:
            return

    threading.Thread(target=read, daemon=True).start()
    runs.here.started.append(process)
    return process, parent


def test_detached_it_is_listed_shown_and_stopped(runs: Runs) -> None:
    done = runs.run("launch", "plan.json", *LONG, "--detach", "--json")
    assert done.returncode == 0, done.stderr + runs.told()
    run_id = json.loads(done.stdout)["run_id"]
    (found,) = [one for one in runs.ps() if one["run_id"] == run_id]
    assert (found["status"], found["supervised"]) == ("running", "alive")
    assert found["supervisor"]["attached"] is False
    assert run_id in runs.run("ps").stdout
    logs = runs.run("logs", run_id[-4:], "--rank", "0", "-n", "3")
    assert [line.startswith("forward ") for line in logs.stdout.splitlines()] == [True] * 3
    assert "[0 fast] forward" in runs.run("logs", "--rank", "fast").stdout
    assert runs.run("logs", "--rank", "7").returncode == 2
    assert "training" in runs.run("logs", "--supervisor").stdout
    viewer = runs.start("attach", run_id[-4:])
    assert viewer.stderr is not None
    assert any("step" in line for line in viewer.stderr)
    viewer.send_signal(signal.SIGTERM)
    viewer.communicate(timeout=PATIENCE_S)
    assert viewer.returncode == 143
    follower = runs.start("logs", "-f", "-n", "0", "--rank", "0")
    stopped = runs.run("stop", "--json")
    assert stopped.returncode == 0, stopped.stderr + runs.told()
    (ended,) = json.loads(stopped.stdout)["runs"]
    assert (ended["status"], ended["already"]) == ("stopped", False)
    assert ended["checkpoint"] == runs.kept()["step"] == len(runs.steps())
    assert runs.alive() in ([], [follower.pid])
    out, _ = follower.communicate(timeout=PATIENCE_S)
    assert follower.returncode == 0
    assert "forward" in out
    assert runs.alive() == []
    again = runs.run("stop", run_id)
    assert (again.returncode, "had ended" in again.stdout) == (0, True)


def test_a_killed_launcher_is_followed_without_a_gap(runs: Runs) -> None:
    steps = ("--steps", "150", "--ignore-changes")
    reference = runs.run("launch", "plan.json", *steps, "--json")
    assert reference.returncode == 0, reference.stderr
    losses = [step["loss"] for step in json.loads(reference.stdout)["steps"]]
    count = runs.count
    child = runs.start("launch", "plan.json", *steps)
    runs.trains(count + 1)
    child.kill()
    child.communicate()
    (found,) = [one for one in runs.ps() if one["supervised"] == "gone" and one["status"] == "unsupervised"]
    assert found["detail"] == "ranks on 2 of 2 nodes go on"
    offline = runs.ps("--offline")[0]
    assert (offline["status"], offline["nodes"]) == ("unsupervised", None)
    done = runs.run("attach", "--json")
    assert done.returncode == 0, done.stderr + runs.told()
    measured = json.loads(done.stdout)
    assert [step["loss"] for step in measured["steps"]] == pytest.approx(losses, abs=1e-5)
    assert measured["attempts"] == 1
    assert [line["step"] for line in runs.steps()] == list(range(150))
    printed = (runs.newest() / "logs" / "rank-000.log").read_text().splitlines()
    assert printed == [f"forward {n}" for n in range(1, len(printed) + 1)]
    assert len(printed) >= 150
    assert runs.kept()["status"] == "done"
    assert runs.alive() == []


@pytest.mark.parametrize("more", [(), ("--now",)])
def test_a_killed_launcher_and_then_stop(runs: Runs, more: tuple[str, ...]) -> None:
    count = runs.count
    child = runs.start("launch", "plan.json", *LONG)
    runs.trains(count + 1)
    child.kill()
    child.communicate()
    done = runs.run("stop", *more)
    assert done.returncode == 0, done.stderr + runs.told()
    kept = runs.kept()
    assert (kept["status"], kept["sessions"], kept["supervisor"]) == ("stopped", [], None)
    if not more:
        assert kept["checkpoint"] == kept["step"]
    assert runs.alive() == []
    assert runs.ps()[0]["status"] == "stopped"


def test_what_is_gone_from_the_nodes_goes_on_from_its_checkpoint(runs: Runs) -> None:
    steps = ("--steps", "60", "--ignore-changes", "--checkpoint-every", "5")
    reference = runs.run("launch", "plan.json", *steps, "--json")
    losses = [step["loss"] for step in json.loads(reference.stdout)["steps"]]
    count = runs.count
    child = runs.start("launch", "plan.json", *steps)
    runs.trains(count + 1)
    runs.wait(lambda: runs.kept()["checkpoint"], "no checkpoint")
    child.kill()
    child.communicate()
    for pid in runs.found():
        os.kill(pid, signal.SIGKILL)
    assert runs.alive() == []
    assert runs.ps()[0]["detail"] == "nothing of it is left on its nodes"
    done = runs.run("attach", "--json")
    assert done.returncode == 0, done.stderr + runs.told()
    assert "from the checkpoint of step" in done.stderr
    measured = json.loads(done.stdout)
    # What nodes had not handed over when they were killed is gone; what is there is as it would have been.
    done_steps = [step["step"] for step in measured["steps"]]
    assert done_steps[-1] == 59
    assert [step["loss"] for step in measured["steps"]] == pytest.approx(
        [losses[step] for step in done_steps], abs=1e-5
    )
    assert measured["attempts"] == 2
    assert [line["step"] for line in runs.steps()] == done_steps
    assert runs.alive() == []


def test_the_terminal_is_closed(runs: Runs) -> None:
    count = runs.count
    process, terminal = on_terminal(runs, "launch", "plan.json", *LONG)
    runs.trains(count + 1)
    os.close(terminal)
    process.wait(PATIENCE_S)
    assert process.returncode == 0
    found = runs.ps()[0]
    assert (found["status"], found["supervised"]) == ("running", "alive")
    assert found["supervisor"]["pid"] != process.pid
    before = len(runs.steps())
    runs.wait(lambda: len(runs.steps()) > before, "it does not go on")
    assert runs.run("stop", "--now").returncode == 0
    assert runs.alive() == []


def test_ctrl_c_at_a_terminal_asks(runs: Runs) -> None:
    count = runs.count
    process, terminal = on_terminal(runs, "launch", "plan.json", *LONG)
    runs.trains(count + 1)
    os.write(terminal, b"\x03")
    time.sleep(1)
    os.write(terminal, b"g\n")
    before = len(runs.steps())
    runs.wait(lambda: len(runs.steps()) > before + 3, "it does not go on")
    os.write(terminal, b"\x03")
    time.sleep(1)
    os.write(terminal, b"d\n")
    process.wait(PATIENCE_S)
    assert process.returncode == 0
    os.close(terminal)
    assert runs.ps()[0]["supervised"] == "alive"
    viewer, terminal = on_terminal(runs, "attach")
    time.sleep(3)
    for _ in range(3):
        os.write(terminal, b"\x03")
        time.sleep(0.3)
    viewer.wait(PATIENCE_S)
    assert viewer.returncode == 130
    os.close(terminal)
    assert runs.kept()["status"] == "stopped"
    assert runs.alive() == []


def test_many_ctrl_c_leave_nothing(runs: Runs) -> None:
    count = runs.count
    child = runs.start("launch", "plan.json", *LONG)
    runs.trains(count + 1)
    for _ in range(12):
        if child.poll() is None:
            child.send_signal(signal.SIGINT)
        time.sleep(0.1)
    child.communicate(timeout=PATIENCE_S)
    assert child.returncode == 130
    assert runs.kept()["status"] == "stopped"
    assert runs.alive() == []


def test_the_background_is_told_to_end_and_another_takes_over(runs: Runs) -> None:
    assert runs.run("launch", "plan.json", *LONG, "--detach").returncode == 0
    pid = runs.kept()["supervisor"]["pid"]
    os.kill(pid, signal.SIGTERM)
    runs.wait(lambda: runs.kept()["supervisor"] is None, "it does not let go")
    assert runs.ps()[0]["detail"] == "ranks on 2 of 2 nodes go on"
    one, two = runs.start("attach"), runs.start("attach")
    before = len(runs.steps())
    runs.wait(lambda: len(runs.steps()) > before, "it does not go on")
    one.send_signal(signal.SIGINT)
    two.send_signal(signal.SIGINT)
    for child in (one, two):
        child.communicate(timeout=PATIENCE_S)
    assert runs.kept()["status"] == "stopped"
    assert runs.alive() == []
