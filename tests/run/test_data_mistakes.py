"""Mistakes in data(), made by two local nodes in earnest: each is named at once, and nothing is left."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from skyctl.cli.options import DefaultedWorkloadOptions
from skyctl.errors import SkyctlError
from skyctl.jobs.node_sessions import connect_nodes, require_all
from skyctl.planner.api import plan
from skyctl.records.cluster import Cluster, Node
from skyctl.records.measurement import Measurement
from skyctl.records.problem import Device, Layer, Problem
from skyctl.remote.agent_session import Session
from skyctl.remote.base import ConnectOptions
from skyctl.run.callbacks import RunCallbacks
from skyctl.run.plan_runner import run_plan
from skyctl.run.run_options import RunOptions

from ..helpers import processes

NODES = ("a", "b")
TRAIN = """
import itertools
import os
import random
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

HERE = Path(__file__).parent
MARK = Path("MARK")
_second = None


def is_second():
    # Whether another process was first to make the mark: one end of the pipeline, and not the other.
    global _second
    if _second is None:
        try:
            os.close(os.open(MARK, os.O_CREAT | os.O_EXCL))
            _second = False
        except FileExistsError:
            _second = True
    return _second


def model():
    return [nn.Linear(4, 4), nn.Linear(4, 3)]


def batch(size, generator):
    inputs = torch.randn(size, 4, generator=generator)
    return inputs, inputs[:, :3].argmax(1)


def seeded(seed):
    return torch.Generator().manual_seed(seed)
"""
UNSEEDED = """
def data(batch_size, seed):
    generator = seeded(random.SystemRandom().getrandbits(60))
    while True:
        yield batch(batch_size, generator)
"""
LENGTHS = """
def data(batch_size, seed):
    generator = seeded(seed)
    return [batch(batch_size, generator) for _ in range(6 if is_second() else 5)]
"""
ENDS_EARLY = """
def data(batch_size, seed):
    generator = seeded(seed)
    for _ in range(3 if is_second() else 6):
        yield batch(batch_size, generator)
"""
DTYPE = """
def data(batch_size, seed):
    generator = seeded(seed)
    for step in itertools.count():
        inputs, targets = batch(batch_size, generator)
        yield inputs.double() if step == 3 else inputs, targets
"""
WORKER_DIES = """
class Samples(Dataset):
    def __len__(self):
        return 80

    def __getitem__(self, index):
        if index == 60:
            os._exit(3)
        return batch(1, seeded(index))[0][0], index % 3


def data(batch_size, seed):
    return DataLoader(Samples(), batch_size, num_workers=1)
"""
FILE_MISSING = """
def data(batch_size, seed):
    float((MARK.parent / ("missing.txt" if is_second() else "there.txt")).read_text())
    generator = seeded(seed)
    while True:
        yield batch(batch_size, generator)
"""
NAN = """
def data(batch_size, seed):
    generator = seeded(seed)
    for number in itertools.count(1):
        inputs, targets = batch(batch_size, generator)
        if number == 30:
            inputs[5, 1] = float("nan")
        yield inputs, targets
"""
USED_UP = """
BATCHES = (batch(8, seeded(number)) for number in range(3))


def data(batch_size, seed):
    return BATCHES
"""
SLOW = """
def data(batch_size, seed):
    generator = seeded(seed)
    while True:
        if is_second():
            time.sleep(0.05)
        yield batch(batch_size, generator)
"""
SEED_SWALLOWED = """
def data(batch_size, seed):
    generator = seeded(0)
    for _ in range(2):
        yield batch(batch_size, generator)
"""
SHIPPED = """
ship = ["scale.txt"]


def data(batch_size, seed):
    scale = float((HERE / "scale.txt").read_text())
    generator = seeded(seed)
    while True:
        inputs, targets = batch(batch_size, generator)
        yield inputs * scale, targets
"""
NAMED = [
    pytest.param(UNSEEDED, r"in step 1 the inputs and targets differ", id="order unseeded"),
    pytest.param(
        LENGTHS, r"gives [56] batches an epoch on rank 0 .* and [56] on rank 1", id="lengths differ"
    ),
    pytest.param(ENDS_EARLY, r"step 4 has batch \d of epoch \d on rank 0 .*, batch", id="ends early"),
    pytest.param(
        DTYPE, r"gives inputs of float64\[4\] a sample in step 3, of float32\[4\]", id="dtype changes"
    ),
    pytest.param(WORKER_DIES, r"DataLoader worker .* exited unexpectedly", id="a worker that dies"),
    pytest.param(
        FILE_MISSING, r"node [ab], .*data\(\) failed: FileNotFoundError.*missing\.txt", id="no file"
    ),
    pytest.param(
        NAN, r"the loss of step 30 is nan: the inputs that data\(\) gave \(batch 30 of epoch 1\)", id="NaN"
    ),
    pytest.param(USED_UP, r"gave 3 batches in epoch 1 and none when it was called again", id="used up"),
]


@dataclass
class Pair:
    """Two local nodes, and a script that each holds one layer of."""

    sessions: dict[str, Session]
    cluster: Cluster
    notes: list[str] = field(default_factory=list)

    def train(self, folder: Path, data: str, steps: int) -> Measurement:
        mark = folder / "outside" / "mark"
        mark.parent.mkdir()
        (mark.parent / "there.txt").write_text("1")
        path = folder / "script" / "train.py"
        path.parent.mkdir()
        (path.parent / "scale.txt").write_text("2.5")
        path.write_text(TRAIN.replace('MARK")', f'{mark}")') + data)
        request, loaded = DefaultedWorkloadOptions(batch_size=8).make_request(str(path), microbatches=2)
        mark.unlink(missing_ok=True)  # this process was none of the ends
        layer = {"flops": 1e6, "state_bytes": 1e3, "activation_bytes": 1e3, "output_bytes": 1e2}
        problem = Problem(
            layers=tuple(Layer(name=name, **layer) for name in loaded.names),
            devices=tuple(Device(id=f"{n}/cpu:0", flops_per_s=1e9, memory_bytes=None) for n in NODES),
            microbatches=2,
        )
        made = plan(problem, assign=[("a/cpu:0", 0, 1), ("b/cpu:0", 1, 2)])
        ready = made.model_copy(update={"workload": request.ref(loaded.digest)})
        options = RunOptions(steps=steps, weights=False, ignore_changes=True)
        callbacks = RunCallbacks(note=self.notes.append)
        return run_plan(ready, self.cluster, request, self.sessions, options, callbacks)[0]

    def left(self) -> list[int]:
        """Processes of ranks that still run."""
        return [
            pid
            for session in self.sessions.values()
            for pid in processes.of_session(session.id, "skyctl.worker.rank")
        ]


@pytest.fixture(scope="module")
def connected() -> Iterator[Pair]:
    nodes = tuple(Node(name=name, transport="local", threads=1) for name in NODES)
    with connect_nodes(nodes, ConnectOptions()) as links:
        require_all(links.failures)
        yield Pair(links.sessions, Cluster(name="pair", nodes=nodes))


@pytest.fixture
def pair(connected: Pair) -> Iterator[Pair]:
    connected.notes.clear()
    yield connected
    assert not processes.after_a_moment(connected.left)


@pytest.mark.parametrize(("data", "words"), NAMED)
def test_a_mistake_is_named_and_ends_the_run(pair: Pair, tmp_path: Path, data: str, words: str) -> None:
    with pytest.raises(SkyctlError, match=words) as error:
        pair.train(tmp_path, data, steps=40)
    assert error.value.exit_code == 2
    assert error.value.hint is not None or data is WORKER_DIES


def test_an_end_that_is_slow_is_waited_for(pair: Pair, tmp_path: Path) -> None:
    assert len(pair.train(tmp_path, SLOW, steps=4).steps) == 4


def test_epochs_that_repeat_each_other_are_noted_once(pair: Pair, tmp_path: Path) -> None:
    assert len(pair.train(tmp_path, SEED_SWALLOWED, steps=7).steps) == 7
    assert len([note for note in pair.notes if "same first batch for the next seed" in note]) == 1


def test_a_shipped_file_is_beside_the_script_on_both_nodes(pair: Pair, tmp_path: Path) -> None:
    assert len(pair.train(tmp_path, SHIPPED, steps=2).steps) == 2
