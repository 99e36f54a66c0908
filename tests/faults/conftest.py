"""A cluster of this machine's own processes, and the command itself, run as a user runs it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ..helpers import runs
from ..helpers.commands import Done, Skyctl

TRAIN = """\
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn

FAULT = Path(os.environ.get("FAULT", "/nowhere"))


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


class Here(Skyctl):
    """A folder with a cluster of two local nodes and a workload; ``run`` runs skyctl in it to any end.

    ``fault``: a file that, when it holds a signal's name or ``raise``, makes the first layer do that in the
    thirtieth forward of a process.
    """

    def __init__(self, folder: Path, state: Path) -> None:
        super().__init__(folder, state)
        self.fault = folder.parent / "fault"
        self.cluster("fast", "slow")
        self.env["FAULT"] = str(self.fault)
        self.train(TRAIN)

    def run(self, *words: str, code: int | None = None, **env: str) -> Done:
        return super().run(*words, code=code, **env)

    def launch(self, *words: str, terminal: bool = False) -> runs.Run:
        """``skyctl launch`` with these words; given back as soon as its folder is there."""
        return runs.launch(self, *words, terminal=terminal)

    def cluster(self, *names: str) -> None:
        lines = "".join(
            f"  - {{name: {json.dumps(n)}, transport: local, threads: 1, memory_gib: 2}}\n" for n in names
        )
        (self.folder / "cluster.yaml").write_text(f"name: here\nnodes:\n{lines}")

    def train(self, text: str) -> None:
        (self.folder / "train.py").write_text(text)

    def plan(self) -> Path:
        """Probes and plans; the plan uses both nodes."""
        sizes = ("--batch-size", "8", "--microbatches", "4")
        self.probe_briefly("train.py", *sizes)
        self.run_inside("plan", "train.py", *sizes, "--strategy", "even", "-o", "plan.json")
        return self.folder / "plan.json"


def _made(folder: Path) -> Here:
    (folder / "work").mkdir()
    return Here(folder / "work", folder / "state")


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Here]:
    made = _made(tmp_path)
    yield made
    made.end()


@pytest.fixture(scope="module")
def another(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Here]]:
    """Makes clusters of other nodes, each with state and cache of its own: ``another("a", "b")``."""
    made: list[Here] = []

    def make(*names: str) -> Here:
        folder = tmp_path_factory.mktemp("another")
        made.append(_made(folder))
        made[-1].env["XDG_CACHE_HOME"] = str(folder / "cache")
        made[-1].cluster(*names)
        return made[-1]

    yield make
    for one in made:
        one.end()


def _plan(folder: Path) -> None:
    made = _made(folder)
    try:
        made.plan()
    finally:
        made.end()


@pytest.fixture(scope="module")
def probed(
    tmp_path_factory: pytest.TempPathFactory, made_once: Callable[[str, Callable[[Path], None]], Path]
) -> Iterator[Here]:
    """A cluster with a profile and a plan, for a whole module; probed and planned once for all of them."""
    made = _made(tmp_path_factory.mktemp("planned"))
    shutil.copytree(made_once("planned", _plan), made.folder.parent, dirs_exist_ok=True)
    yield made
    made.end()


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

    def check(done: Done, code: int, *words: str) -> None:
        assert done.returncode == code, done.stderr + done.stdout
        assert "Traceback" not in done.stderr
        assert done.stderr.count("error:") == 1, done.stderr
        for word in words:
            assert word in done.stderr, done.stderr

    return check
