"""Runs in a lab that faults are done to: launched as a user does, waited for, and nothing left of them.

``train.py`` here does what a test writes into ``~/fault`` of one of the nodes (once: it removes the file),
and has the ``~/habits`` that are written there before it starts.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skyctl.lab import cgroups
from skyctl.lab.state import LabState

TRAIN = """\
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

FAULT = Path.home() / "fault"
try:
    HABITS = (Path.home() / "habits").read_text()
except FileNotFoundError:
    HABITS = ""
if "ignores SIGTERM" in HABITS:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def act():
    try:
        fault = FAULT.read_text()
        FAULT.unlink()
    except FileNotFoundError:
        return
    if fault == "segfault":
        ctypes.string_at(0)
    hoard = []
    while fault == "memory":
        hoard.append(bytearray(os.urandom(1 << 20)) * 16)
    os.kill(os.getpid(), getattr(signal, fault))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        act()
        time.sleep(0.004)
        return torch.tanh(self.linear(x))


def model():
    return [Layer() for _ in range(6)]


class Batches(IterableDataset):
    def __init__(self, batch_size, seed):
        self.batch_size, self.seed = batch_size, seed

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            yield (
                torch.randn(self.batch_size, 8, generator=generator),
                torch.randint(8, (self.batch_size,), generator=generator),
            )


def data(batch_size, seed):
    batches = Batches(batch_size, seed)
    if "has children" in HABITS:
        batches = DataLoader(batches, batch_size=None, num_workers=1)
        # Of two grandchildren in sessions of their own, whose parents are gone, one ignores SIGTERM, and one
        # has nothing in its environment to know it by.
        subprocess.run(["setsid", "sh", "-c", "trap '' TERM; sleep 4001 & :"], check=True)
        subprocess.run(["setsid", "sh", "-c", "sleep 4002 & :"], env={"PATH": os.environ["PATH"]}, check=True)
    for inputs, targets in batches:
        yield inputs, targets
"""
SIZES = ("--batch-size", "8", "--microbatches", "4")
PATIENCE_S = 120.0


def until(happened: Callable[[], Any], what: Callable[[], str] = lambda: "") -> Any:
    """What ``happened`` gives as soon as that is true. Fails with ``what`` where it is not in time."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            if found := happened():
                return found
        except (OSError, ValueError, KeyError, StopIteration):
            pass
        assert time.monotonic() < deadline, what()
        time.sleep(0.03)


class Terminal:
    """A command on a pseudo-terminal of its own."""

    def __init__(self, argv: list[str], env: dict[str, str], folder: Path) -> None:
        self.fd, child = pty.openpty()
        self.process = subprocess.Popen(
            argv,
            cwd=folder,
            env={**env, "TERM": "dumb"},
            stdin=child,
            stdout=child,
            stderr=child,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 - as a terminal's shell does
        )
        os.close(child)
        self.text = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        try:
            while data := os.read(self.fd, 4096):
                self.text += data.decode(errors="replace")
        except OSError:
            return

    def types(self, keys: str, *, answered: str | None = None) -> None:
        """Types that; waits until there is one more of the words that it is answered with."""
        before = self.text.count(answered) if answered else 0
        os.write(self.fd, keys.encode())
        if answered:
            until(lambda: self.text.count(answered) > before, lambda: self.text)

    def close(self) -> None:
        """Ends what still runs on it."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(10)
        os.close(self.fd)


class Cluster:
    """A lab with a plan over all of its nodes, and skyctl run on it as a user runs it."""

    def __init__(self, state: LabState, folder: Path) -> None:
        self.state = state
        self.folder = folder
        self.home = folder / "state"
        self.nodes = [node.name for node in state.nodes]
        self.env = {
            **os.environ,
            "SKYCTL_HOME": str(self.home),
            "SKYCTL_CLUSTER": str(state.cluster),
            "NO_COLOR": "1",
        }
        self.started: list[subprocess.Popen[str]] = []
        self.terminals: list[Terminal] = []
        self._own = {name: set(self.members(name)) for name in self.nodes}
        (folder / "train.py").write_text(TRAIN)

    # --- commands

    def start(self, *words: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        argv = [sys.executable, "-m", "skyctl", *words]
        child = subprocess.Popen(
            argv, env=self.env, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True
        )
        self.started.append(child)
        return child

    def run(self, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        """To its end, which must be with that exit code."""
        return ended(self.start(*words), code)

    def on_terminal(self, *words: str) -> Terminal:
        made = Terminal([sys.executable, "-m", "skyctl", *words], self.env, self.folder)
        self.terminals.append(made)
        return made

    def plan(self, *names: str) -> None:
        """``plan.json`` over these nodes, two layers each."""
        self.run("probe", "train.py", *SIZES, "--links", "none")
        assigned = ",".join(f"{name}={2 * i}:{2 * i + 2}" for i, name in enumerate(names))
        self.run("plan", "train.py", *SIZES, "--assign", assigned, "-o", "plan.json")

    def launch(self, *words: str, terminal: bool = False) -> Run:
        """``skyctl launch`` with these words; given back as soon as its folder is there."""
        before = set((self.home / "runs").glob("*"))
        begin = self.on_terminal if terminal else self.start
        child = begin("launch", *words)
        process = child.process if isinstance(child, Terminal) else child

        def new() -> set[Path]:
            assert process.poll() is None or process.returncode == 0, child
            return set((self.home / "runs").glob("*")) - before

        return Run(self, child, until(new).pop())

    def ps(self, *words: str) -> list[dict]:
        return json.loads(self.run("ps", "--json", *words).stdout)["runs"]

    # --- nodes

    def at_home(self, node: str, name: str, text: str) -> None:
        """A file in that node's HOME, there whole or not at all."""
        folder = self.state.node_folder(node) / "home"
        (folder / f".{name}").write_text(text)
        (folder / f".{name}").replace(folder / name)

    def members(self, node: str) -> list[int]:
        """Every process of the node, by its id out here."""
        return cgroups.members(Path(self.state.node(node).cgroups[0]))

    def short_of_memory(self, node: str) -> int:
        """How many processes the kernel has killed there because the node had no memory left."""
        found = 0
        for folder in map(Path, self.state.node(node).cgroups):
            for file in ("memory.events", "memory.oom_control"):
                if (folder / file).exists():
                    fields = dict(line.split() for line in (folder / file).read_text().splitlines())
                    found = max(found, int(fields.get("oom_kill", 0)))
        return found

    def sshd(self, node: str) -> int:
        """The one that listens."""
        return next(pid for pid in self._own[node] if b"sshd" in read(pid, "cmdline"))

    def own_again(self, node: str) -> None:
        """What runs there now is the node's own."""
        self._own[node] = set(self.members(node))

    def left(self) -> list[str]:
        """What there is on nodes beside what a node has of itself: processes, sessions, half files."""
        found = []
        for name in self.nodes:
            for pid in set(self.members(name)) - self._own[name]:
                if b") Z " not in read(pid, "stat"):
                    found.append(f"{name}: {pid} {read(pid, 'cmdline').replace(bytes(1), b' ').decode()}")
            folder = self.state.node_folder(name)
            for pattern in (
                "home/.cache/skyctl/sessions/s-*",
                "home/**/.*.part",
                "home/**/*.tmp",
                "tmp/skyctl*",
            ):
                # A copy that was cut off with its keeper is removed by the next one (docs/faults.md).
                kept = folder / "home" / ".cache" / "skyctl" / "runs"
                found += [f"{name}: {path}" for path in folder.glob(pattern) if kept not in path.parents]
        return found

    def here(self) -> list[str]:
        """Processes of skyctl's that were started here, and half files in its folder."""
        mark = f"SKYCTL_HOME={self.home}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                pid = int(entry.name)
                ours = mark in read(pid, "environ").split(b"\0") and b") Z " not in read(pid, "stat")
                found += [f"{pid} {read(pid, 'cmdline')!r}"] if ours else []
        return found + [str(path) for path in self.home.glob("**/.*.tmp")]

    def settled(self) -> None:
        """Nothing is left of any run, here or there, once what is ending has had a moment."""
        deadline = time.monotonic() + 20
        while (left := self.left() + self.here()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not left, left

    def end(self) -> None:
        """For tests that failed half-way."""
        for terminal in self.terminals:
            terminal.close()
        for child in self.started:
            if child.poll() is None:
                child.kill()
            child.communicate()
        self.terminals.clear()
        self.started.clear()
        for name in self.nodes:
            for file in ("fault", "habits"):
                (self.state.node_folder(name) / "home" / file).unlink(missing_ok=True)


class Run:
    """One that was launched: its process, and its folder."""

    def __init__(self, cluster: Cluster, child: subprocess.Popen[str] | Terminal, folder: Path) -> None:
        self.cluster = cluster
        self.child = child
        self.folder = folder
        self.id = folder.name

    @property
    def process(self) -> subprocess.Popen[Any]:
        return self.child.process if isinstance(self.child, Terminal) else self.child

    @property
    def state(self) -> dict:
        return json.loads((self.folder / "state.json").read_text())

    def steps(self) -> list[dict]:
        path = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for(self, step: int) -> Run:
        """Until it has done so many steps."""

        def done() -> bool:
            assert self.process.poll() in (None, 0), self.process.communicate()
            return len(self.steps()) >= step

        until(done, self.told)
        return self

    def more(self, steps: int = 2) -> Run:
        """Until it has done so many more."""
        return self.wait_for(len(self.steps()) + steps)

    def told(self) -> str:
        log = self.folder / "supervisor.log"
        return f"{self.state}\n{log.read_text() if log.exists() else ''}"

    def rank(self, node: str) -> int:
        """Its rank's process there, by its id out here."""
        session = next(one["session"] for one in self.state["sessions"] if one["node"] == node)
        tag = f"SKYCTL_TASK={session}/".encode()
        for pid in self.cluster.members(node):
            tagged = any(value.startswith(tag) for value in read(pid, "environ").split(b"\0"))
            if tagged and b"skyctl.worker.rank" in read(pid, "cmdline"):
                return pid
        raise AssertionError(f"no rank on {node}")

    def copied(self, node: str, layer: int) -> bool:
        """Whether that node keeps a checkpoint of that layer."""
        folder = self.cluster.state.node_folder(node) / "home" / ".cache" / "skyctl" / "runs"
        return any(folder.glob(f"{self.id}@*/step-*/layer-{layer:05d}.safetensors"))

    def agent(self, node: str) -> int:
        """Its agent there."""
        return int(read(self.rank(node), "stat").rpartition(b")")[2].split()[1])

    def end(self, code: int = 0) -> subprocess.CompletedProcess[str]:
        """To its process's end."""
        if isinstance(self.child, Terminal):
            self.child.process.wait(PATIENCE_S)
            assert self.child.process.returncode == code, self.child.text
            return subprocess.CompletedProcess([], code, "", self.child.text)
        return ended(self.child, code)

    def is_as(self, losses: list[float], attempts: int) -> None:
        """It has ended well, with those losses (which may be more)."""
        state = self.state
        assert (state["status"], len(state["attempts"])) == ("done", attempts), self.told()
        measured = json.loads((self.folder / "measurement.json").read_text())
        for steps in (self.steps(), measured["steps"]):
            assert len(steps) == state["steps"], self.told()
            self.loses(steps, losses)

    def loses(self, steps: list[dict], losses: list[float]) -> None:
        """Those are its first steps, each once, with those losses."""
        assert [step["step"] for step in steps] == list(range(len(steps))), self.told()
        assert [step["loss"] for step in steps] == pytest.approx(losses[: len(steps)], rel=1e-5)

    def is_stopped(self, *, kept: bool = True) -> None:
        """It was stopped, with a last checkpoint (``kept``)."""
        state = self.state
        assert (state["status"], state["sessions"]) == ("stopped", []), self.told()
        assert state["step"] == len(self.steps()), self.told()
        assert not kept or state["checkpoint"] == state["step"], self.told()


def ended(child: subprocess.Popen[str], code: int) -> subprocess.CompletedProcess[str]:
    out, err = child.communicate(timeout=PATIENCE_S)
    assert child.returncode == code, err + out
    assert "Traceback" not in err, err
    return subprocess.CompletedProcess([], code, out, err)


def read(pid: int, name: str) -> bytes:
    """A file of that process's in /proc; empty where it is gone."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""
