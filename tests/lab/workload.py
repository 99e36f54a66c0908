"""The workload of tests in labs. Its layers sleep, so that a step takes long enough to be struck in it.

It does what a test writes into ``~/fault`` of a node (once: the file is removed first): a signal's name,
``segfault`` or ``memory``; and has the ``~/habits`` that are written there before it starts.
"""

from __future__ import annotations

LAYERS = 8
_TRAIN = """\
import ctypes
import os
import signal
import subprocess
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

LAYERS, SLEEP_S, WIDTH = @layers@, @sleep_s@, @width@
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
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        if not hasattr(x, "fake_mode"):
            act()
            time.sleep(SLEEP_S)
        return x + torch.tanh(self.linear(x))


def model():
    return [Layer() for _ in range(LAYERS)]


class Batches(IterableDataset):
    def __init__(self, batch_size, seed):
        self.batch_size, self.seed = batch_size, seed

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            inputs = torch.randn(self.batch_size, WIDTH, generator=generator)
            yield inputs, torch.sin(3 * inputs.flip(1))


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


def loss(outputs, targets):
    return (outputs - targets).square().mean()
"""


def train_py(sleep_s: float, layers: int = LAYERS, width: int = 16) -> str:
    """The file's text: so many square layers of that width that sleep so long each, for each microbatch."""
    return (
        _TRAIN.replace("@layers@", str(layers))
        .replace("@sleep_s@", str(sleep_s))
        .replace("@width@", str(width))
    )
