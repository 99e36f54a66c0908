"""A cluster of this machine's own processes, and the command itself, run as a user runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

TRAIN = """\
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn

FAULT = Path({fault!r})


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.count = 0

    def forward(self, x):
        self.count += 1
        if self.count == 30 and FAULT.exists():
            fault = FAULT.read_text()
            if fault == "raise":
                raise ValueError("the thirtieth")
            os.kill(os.getpid(), getattr(signal, fault))
        return self.linear(x)


class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        time.sleep(0.005)
        return self.linear(x)


def model():
    return [First()] + [Slow() for _ in range(5)] + [nn.Linear(8, 3)]


def data(batch_size, seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield (
            torch.randn(batch_size, 8, generator=generator),
            torch.randint(3, (batch_size,), generator=generator),
        )
"""


class Here:
    """A folder with a cluster of two local nodes and a workload; ``run`` runs skyctl in it.

    ``fault``: a file that, when it holds a signal's name or ``raise``, makes the first layer do that in the
    thirtieth forward of a process.
    """

    def __init__(self, folder: Path, state: Path) -> None:
        self.folder = folder
        self.state = state
        self.env = {**os.environ, "SKYCTL_HOME": str(state), "NO_COLOR": "1"}
        self.started: list[subprocess.Popen[str]] = []
        self.fault = folder.parent / "fault"
        self.cluster("fast", "slow")
        self.train(TRAIN.format(fault=str(self.fault)))

    def cluster(self, *names: str) -> None:
        lines = "".join(
            f"  - {{name: {json_text(n)}, transport: local, threads: 1, memory_gib: 2}}\n" for n in names
        )
        (self.folder / "cluster.yaml").write_text(f"name: here\nnodes:\n{lines}")

    def train(self, text: str) -> None:
        (self.folder / "train.py").write_text(text)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, "-m", "skyctl", *arguments],
            cwd=self.folder,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(child)
        return child

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        child = self.start(*arguments)
        out, err = child.communicate(timeout=120)
        return subprocess.CompletedProcess(arguments, child.returncode, out, err)

    def plan(self) -> Path:
        """Probes and plans; the plan uses both nodes."""
        sizes = ("--batch-size", "8", "--microbatches", "4")
        done = self.run("probe", "train.py", *sizes)
        assert done.returncode == 0, done.stderr
        done = self.run("plan", "train.py", *sizes, "--strategy", "even", "-o", "plan.json")
        assert done.returncode == 0, done.stderr
        return self.folder / "plan.json"

    def end(self) -> None:
        for child in self.started:
            if child.poll() is None:
                child.kill()
            child.communicate()


def json_text(text: str) -> str:
    import json

    return json.dumps(text)


def _made(folder: Path) -> Iterator[Here]:
    work = folder / "work"
    work.mkdir()
    made = Here(work, folder / "state")
    yield made
    made.end()


@pytest.fixture(scope="session")
def here_in() -> type[Here]:
    """Makes a ``Here`` of two folders, the work's and the state's."""
    return Here


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Here]:
    yield from _made(tmp_path)


@pytest.fixture(scope="module")
def another(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Here]]:
    """Makes clusters of other nodes, each with state and cache of its own: ``another("a", "b")``."""
    made: list[Here] = []

    def make(*names: str) -> Here:
        folder = tmp_path_factory.mktemp("another")
        (folder / "work").mkdir()
        made.append(Here(folder / "work", folder / "state"))
        made[-1].env["XDG_CACHE_HOME"] = str(folder / "cache")
        made[-1].cluster(*names)
        return made[-1]

    yield make
    for one in made:
        one.end()


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Here]:
    """One probe and one plan for a whole module."""
    for made in _made(tmp_path_factory.mktemp("planned")):
        made.plan()
        yield made


@pytest.fixture
def planned(probed: Here) -> Iterator[Here]:
    """As ``probed``, with cluster, workload and fault as they were afterwards."""
    kept = {path: path.read_bytes() for path in probed.folder.iterdir() if path.is_file()}
    yield probed
    probed.end()
    probed.fault.unlink(missing_ok=True)
    for path, content in kept.items():
        path.write_bytes(content)


@pytest.fixture
def complains() -> Callable[..., None]:
    """Asserts an exit code, one clear message with these words, and no traceback."""

    def check(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
        assert done.returncode == code, done.stderr + done.stdout
        assert "Traceback" not in done.stderr
        assert done.stderr.count("error:") == 1, done.stderr
        for word in words:
            assert word in done.stderr, done.stderr

    return check
