"""The labs and workloads in which forms of plans are compared."""

from __future__ import annotations

from pathlib import Path

from runs.data import LAN
from runs.data_prediction import UPLINK
from runs.prediction import source_of

WAN = """\
nodes:
  - {name: n1, cpus: 0.6, memory_gib: 4, rate_mbit: 200, site: a}
  - {name: n2, cpus: 0.4, memory_gib: 4, rate_mbit: 200, site: a}
  - {name: n3, cpus: 0.3, memory_gib: 4, rate_mbit: 200, site: b}
  - {name: n4, cpus: 0.2, memory_gib: 4, rate_mbit: 200, site: b}
sites: {latency_ms: 20, uplink_mbit: {a: 50, b: 50}}
"""
UNEQUAL = """\
nodes:
  - {name: n1, cpus: 0.7, memory_gib: 4, rate_mbit: 3000}
  - {name: n2, cpus: 0.7, memory_gib: 4, rate_mbit: 3000}
  - {name: n3, cpus: 0.35, memory_gib: 4, rate_mbit: 3000}
  - {name: n4, cpus: 0.14, memory_gib: 4, rate_mbit: 3000}
"""
EQUAL = """\
nodes:
  - {name: n1, cpus: 0.4, memory_gib: 4, rate_mbit: 200}
  - {name: n2, cpus: 0.4, memory_gib: 4, rate_mbit: 200}
  - {name: n3, cpus: 0.4, memory_gib: 4, rate_mbit: 200}
  - {name: n4, cpus: 0.4, memory_gib: 4, rate_mbit: 200}
"""
CLUSTERS = {
    "LAN": LAN.replace("RATE", "1000"),
    "WAN": WAN,
    "uplink": UPLINK,
    "70/70/35/14%": UNEQUAL,
    "equal nodes": EQUAL,
}
KINDS = ("gpt", "bert", "llama", "convolutional")
WORKLOADS = {
    **dict.fromkeys(("LAN", "WAN", "uplink"), KINDS),
    "70/70/35/14%": ("gpt",),
    "equal nodes": ("undivided",),
}
"""In each lab."""
SIZES = {
    **dict.fromkeys(KINDS, ("--batch-size", 64, "--microbatches", 16)),
    "undivided": ("--batch-size", 8192, "--microbatches", 16),
}
WIDTH, REPEATS, NARROW = 384, 8, 64
"""Of the two layers of the undivided model; what passes between them is narrow."""


def source_in(folder: Path, name: str, pictures: str) -> str:
    """The workload of that name, its file written to the folder; ``pictures``: the convolutional one's."""
    if name == "undivided":
        path = folder / "undivided.py"
        path.write_text(undivided())
        return str(path)
    return source_of(folder, name, pictures)


def undivided() -> str:
    """A train.py whose two layers can't be cut: a pipeline has two stages at most, whatever there is."""
    return f'''
"""Two layers, each of several squares that stay together: as many stages at most."""
import torch
from torch import nn

class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = [{NARROW}, *[{WIDTH}] * {REPEATS + 1}, {NARROW}]
        self.parts = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:]))
    def forward(self, x):
        for part in self.parts:
            x = part(x).relu()
        return x

def model():
    return [Wide(), Wide()]

def data(batch_size, seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, {NARROW}, generator=generator)
        yield x, x.roll(1, dims=1)

def loss(outputs, targets):
    return nn.functional.mse_loss(outputs, targets)
'''
