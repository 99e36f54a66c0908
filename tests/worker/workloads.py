"""The workload that the worker's tests train, and edits of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

WORKLOAD = """
import torch
from torch import nn

class Embed(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 8)
    def forward(self, ids):
        return self.table(ids), ids

class Mix(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
    def forward(self, given):
        x, ids = given
        return self.linear(x), ids, x

class Relu(nn.Module):
    def forward(self, given):
        x, ids, skip = given
        return x.relu(), ids, skip

class Join(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
    def forward(self, given):
        x, ids, skip = given
        return self.norm(x + skip) * (ids > 2).unsqueeze(-1)

class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 11)
    def forward(self, x):
        return self.linear(x.mean(1))

def model():
    return nn.Sequential(Embed(), Mix(), Relu(), Join(), nn.Linear(8, 8), nn.GELU(), Head())

def data(batch_size, seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        ids = torch.randint(0, 11, (batch_size, 5), generator=generator)
        yield ids, ids[:, 0]

def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets)

def optimizer(parameters):
    return OPTIMIZER
"""
LAYERS = 7
OPTIMIZERS = {
    "sgd": "torch.optim.SGD(parameters, lr=0.1, momentum=0.9)",
    "adamw": "torch.optim.AdamW(parameters, lr=0.01)",
}
DROPOUT = (
    "return self.linear(x), ids, x",
    "return torch.dropout(self.linear(x), 0.4, self.training), ids, x",
)
VALIDATION = """
def validation(batch_size, seed):
    generator = torch.Generator().manual_seed(seed + 99)
    for size in (batch_size, batch_size, 3, batch_size):
        ids = torch.randint(0, 11, (size, 5), generator=generator)
        yield ids, ids[:, 0]
"""
RAISING = (
    "return self.norm(x + skip)",
    "self.calls = getattr(self, 'calls', 0) + 1\n"
    "        if self.calls == 7 and x.device.type == 'cpu' and not hasattr(x, 'fake_mode'):\n"
    "            raise ValueError('bad sample')\n"
    "        return self.norm(x + skip)",
)
"""An edit: the fourth layer raises in its seventh call, in step 1 at microbatch 2 of four."""


def edit_workload(spec: dict[str, Any], *edits: tuple[str, str], text: str = "") -> dict[str, Any]:
    """Replaces parts of the spec's file, and adds text at its end; returns the spec."""
    path = Path(spec["path"])
    source = path.read_text()
    for old, new in edits:
        assert old in source
        source = source.replace(old, new)
    path.write_text(source + text)
    return spec
