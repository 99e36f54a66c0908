"""A run over a lab's real SSH, and harm to its nodes: for tests of what a run survives, and for benchmarks.

The workload sleeps in its layers, so that steps take long enough to be struck in their middle.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from skyctl.lab import inside
from skyctl.lab.state import LabState

PATIENCE_S = 240.0
SIZES = ("--batch-size", "8", "--microbatches", "4")
LAYERS = 8
TRAIN = """\
import time

import torch
from torch import nn

SLEEP_S = {sleep_s}


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        if not hasattr(x, "fake_mode"):
            time.sleep(SLEEP_S)
        return x + torch.tanh(self.linear(x))


def model():
    return [Layer() for _ in range({layers})]


def data(batch_size, seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        inputs = torch.randn(batch_size, 16, generator=generator)
        yield inputs, torch.sin(3 * inputs.flip(1))


def loss(outputs, targets):
    return (outputs - targets).square().mean()
"""


class Cluster:
    """A lab, a workload of eight layers that sleep ``sleep_s`` each, and skyctl as a user runs it."""

    def __init__(self, lab: LabState, folder: Path, sleep_s: float) -> None:
        self.lab = lab
        self.folder = folder
        self.runs = folder / "state" / "runs"
        self.env = {**os.environ, "SKYCTL_HOME": str(folder / "state"), "SKYCTL_CLUSTER": str(lab.cluster)}
        self.env["NO_COLOR"] = "1"
        self.started: list[tuple[subprocess.Popen[bytes], Path]] = []
        (folder / "train.py").write_text(TRAIN.format(sleep_s=sleep_s, layers=LAYERS))

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        """Its output goes to files, so that nothing waits for a reader."""
        base = self.folder / f"said-{len(self.started):03d}"
        with base.with_suffix(".out").open("wb") as out, base.with_suffix(".err").open("wb") as err:
            argv = [sys.executable, "-m", "skyctl", *words]
            child = subprocess.Popen(
                argv, env=self.env, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=out, stderr=err
            )
        self.started.append((child, base))
        return child

    def said(self, child: subprocess.Popen[bytes]) -> tuple[str, str]:
        base = next(base for one, base in self.started if one is child)
        return base.with_suffix(".out").read_text(), base.with_suffix(".err").read_text()

    def ended(
        self, child: subprocess.Popen[bytes], code: int = 0, timeout_s: float = PATIENCE_S
    ) -> tuple[str, str]:
        """Waits for it; what it said on stdout and stderr."""
        child.wait(timeout_s)
        out, err = self.said(child)
        assert child.returncode == code, f"{child.args}: {child.returncode}\n{err}\n{out}"
        assert "Traceback" not in err, err
        return out, err

    def run(self, *words: str, code: int = 0) -> tuple[str, str]:
        return self.ended(self.start(*words), code)

    def plan(self, *cut: str) -> Path:
        """Probes, and plans with two layers for each node, or as ``cut`` says."""
        names = [node.name for node in self.lab.nodes]
        share = LAYERS // len(names)
        even = [f"{name}={i * share}:{(i + 1) * share}" for i, name in enumerate(names)]
        even[-1] = f"{names[-1]}={(len(names) - 1) * share}:{LAYERS}"
        self.run("probe", "train.py", *SIZES, "--links", "none")
        self.run("plan", "train.py", *SIZES, "--assign", ",".join(cut or even), "-o", "plan.json")
        return self.folder / "plan.json"

    def launch(self, steps: int, *words: str) -> Run:
        return Run(self, "plan.json", "--steps", str(steps), "--json", *words)

    def losses(self, steps: int) -> list[float]:
        """Of a run that nothing happens to."""
        out, _ = self.run("launch", "plan.json", "--steps", str(steps), "--json", "--checkpoint-every", "0")
        return [step["loss"] for step in json.loads(out)["steps"]]

    def end(self) -> None:
        """Nothing that was started here goes on."""
        for child, _ in self.started:
            if child.poll() is None:
                child.kill()
            child.wait()
        for node in self.lab.nodes:
            for pid in strays(self.lab, node.name):
                kill(pid)


class Run:
    """A launch under way, and its folder."""

    def __init__(self, cluster: Cluster, *words: str) -> None:
        self.cluster = cluster
        before = set(cluster.runs.glob("*"))
        self.child = cluster.start("launch", *words)
        self.folder = Path()
        self.until(lambda: bool(set(cluster.runs.glob("*")) - before))
        self.folder = (set(cluster.runs.glob("*")) - before).pop()

    @property
    def state(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "state.json").read_text()))

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl so far; of a step done twice, both."""
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def until(self, happened: Callable[[], object], timeout_s: float = PATIENCE_S) -> None:
        """Until that is so; files that are not there yet, or half there, are looked at again."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with suppress(OSError, ValueError, KeyError, IndexError, StopIteration):
                if happened():
                    return
            assert self.child.poll() is None, self.cluster.said(self.child)
            time.sleep(0.02)
        raise AssertionError(f"it did not happen: {self.cluster.said(self.child)[1]}")

    def wait_for(self, step: int) -> Run:
        """Until so many steps are done."""
        self.until(lambda: self.steps[-1]["step"] >= step - 1)
        return self

    def goes_on(self, steps: int = 3) -> None:
        """Until it has done so many steps more than now."""
        now = self.state["step"]
        self.until(lambda: self.state["step"] >= now + steps)

    def end(self, code: int = 0, timeout_s: float = PATIENCE_S) -> tuple[dict[str, Any], str]:
        """Waits for its end: (the measurement, stderr)."""
        out, err = self.cluster.ended(self.child, code, timeout_s)
        return (json.loads(out) if out else {}), err

    def attach(self) -> None:
        """Another command takes the run over."""
        self.child = self.cluster.start("attach", self.folder.name, "--json")


def processes(lab: LabState, node: str) -> dict[int, str]:
    """All processes of that node, by their ids here: id → command."""
    there = lab.node(node).process
    assert there is not None
    space = Path(f"/proc/{there.pid}/ns/net").readlink()
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if (entry / "ns" / "net").readlink() == space:
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    if command and int(entry.name) != there.pid:
                        found[int(entry.name)] = command
    return found


def strays(lab: LabState, node: str) -> dict[int, str]:
    """What is there beside the sshd that listens."""
    return {pid: c for pid, c in processes(lab, node).items() if "[listener]" not in c and "sshd -D" not in c}


def ranks(lab: LabState, node: str) -> list[int]:
    return [pid for pid, command in processes(lab, node).items() if "worker.rank" in command]


def agent(lab: LabState, node: str) -> int:
    """The agent: it has started the rank."""
    (rank,) = ranks(lab, node)
    return int(Path(f"/proc/{rank}/stat").read_bytes().rpartition(b")")[2].split()[1])


def connections(lab: LabState, node: str) -> list[int]:
    """The sshd processes that serve a connection, not the one that listens."""
    found = processes(lab, node)
    return [
        pid for pid, c in found.items() if c.startswith(("sshd: ", "sshd-session")) and "listener" not in c
    ]


def listeners(lab: LabState, node: str) -> list[int]:
    return [pid for pid, c in processes(lab, node).items() if "[listener]" in c]


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def switch_off(lab: LabState, node: str) -> None:
    """sshd and all else of it ends at once, and nobody can log in; see ``switch_on``."""
    for pid in (*listeners(lab, node), *processes(lab, node)):
        kill(pid)


def switch_on(lab: LabState, node: str) -> None:
    command = [
        "sh",
        "-c",
        "exec setsid /usr/sbin/sshd -E /run/sshd.log -f /run/skyctl/sshd_config </dev/null >/dev/null 2>&1",
    ]
    done = inside.run(lab, node, command)
    assert done.returncode == 0, done.stderr


@contextmanager
def black(lab: LabState, node: str) -> Iterator[None]:
    """The node's link carries nothing for as long as this lasts."""
    inside.cut_off(lab, node)
    try:
        yield
    finally:
        inside.rejoin(lab, node)


def left(cluster: Cluster, *nodes: str) -> dict[str, list[str]]:
    """What is left of runs on those nodes, after a moment: processes, session folders, half-written files."""
    deadline = time.monotonic() + 20
    while True:
        found = {}
        for node in nodes or [node.name for node in cluster.lab.nodes]:
            commands = [c for c in strays(cluster.lab, node).values() if not c.startswith("sshd")]
            if commands + leavings(cluster.lab, node):
                found[node] = commands + leavings(cluster.lab, node)
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.2)


def leavings(lab: LabState, node: str) -> list[str]:
    """Session folders, unfinished files and a run's checkpoints in that node's home and /tmp."""
    folder = lab.node_folder(node)
    patterns = ("sessions/s-*", "sessions/s-*/*", "**/.new-*", "**/.gone-*", "runs/*")
    caches = [folder / "home" / ".cache" / "skyctl"]
    found = [path for cache in caches for pattern in patterns for path in cache.glob(pattern)]
    found += (folder / "tmp").glob("skyctl*")
    return sorted(str(path.relative_to(folder)) for path in found)
