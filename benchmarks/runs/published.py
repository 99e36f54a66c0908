"""Against the published system's way of training: one batch through the chain, no microbatches.

The same BERT of 39 layers (12 encoders of three layers each, as Sky Computing cuts them; hidden 256) on three
devices with time factors 1, 2 and 5. There: 32 samples a step in batches of 8, each through the whole chain
and back before the next one starts, under the cut that is optimal for that system (the least largest stage,
found exactly, not by its heuristic). Here: the same 32 samples as skyctl plans them. Its optimizer runs once
for four batches here, which favours it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from os import environ
from pathlib import Path
from typing import Any

from runs.labs import Bench

WORKLOAD = """
import torch
from torch import nn

HIDDEN, HEADS, CONTEXT, VOCABULARY = 256, 8, 128, 1024

class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(CONTEXT, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
    def forward(self, ids):
        return self.norm(self.token(ids) + self.position.weight)

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
    def forward(self, x):
        n, length, _ = x.shape
        q, k, v = self.qkv(x).view(n, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.norm(x + self.out(mixed.transpose(1, 2).reshape(n, length, HIDDEN)))

class Intermediate(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(HIDDEN, 4 * HIDDEN)
    def forward(self, x):
        return x, nn.functional.gelu(self.linear(x))

class Output(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4 * HIDDEN, HIDDEN), nn.LayerNorm(HIDDEN)
    def forward(self, given):
        x, wide = given
        return self.norm(x + self.linear(wide))

class Pooler(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
    def forward(self, x):
        return self.linear(x[:, 0]).tanh()

def model():
    encoder = [layer() for _ in range(12) for layer in (Attention, Intermediate, Output)]
    return [Embedding(), *encoder, Pooler(), nn.Linear(HIDDEN, 2)]

def data(batch_size, seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        ids = torch.randint(0, VOCABULARY, (batch_size, CONTEXT), generator=generator)
        yield ids, torch.randint(0, 2, (batch_size,), generator=generator)
"""
CLUSTER = """\
name: factors
nodes:
  - {name: one, transport: local, threads: 1}
  - {name: two, transport: local, threads: 1, slowdown: 2.0}
  - {name: five, transport: local, threads: 1, slowdown: 5.0}
"""
BATCH, THEIR_BATCHES, STEPS = 32, 4, 6


def published() -> Iterator[dict[str, Any]]:
    """One figure: samples per second here ÷ there."""
    with tempfile.TemporaryDirectory(prefix="skyctl-bench-") as name:
        folder = Path(name)
        (folder / "train.py").write_text(WORKLOAD)
        (folder / "cluster.yaml").write_text(CLUSTER)
        env = {"SKYCTL_HOME": str(folder / "state"), "SKYCTL_CLUSTER": str(folder / "cluster.yaml")}
        bench = Bench(folder, {**environ, **env})
        theirs = _step_s(bench, THEIR_BATCHES, "--schedule", "sequential", "--objective", "bottleneck")
        ours = _step_s(bench, None)
    yield {
        "benchmark": "runtime",
        "section": "published",
        "layers": 39,
        "factors": [1, 2, 5],
        "theirs": theirs,
        "ours": ours,
        "samples_per_s": [round(BATCH / theirs["step_s"], 2), round(BATCH / ours["step_s"], 2)],
        "ratio": round(theirs["step_s"] / ours["step_s"], 3),
    }


def _step_s(bench: Bench, microbatches: int | None, *how: object) -> dict[str, Any]:
    source, path = bench.folder / "train.py", bench.folder / "plan.json"
    sizes = ["--batch-size", BATCH, *([] if microbatches is None else ["--microbatches", microbatches])]
    bench.skyctl("probe", source, *sizes, "--refresh")
    bench.skyctl("plan", source, *sizes, "--parallel", "pipeline", *how, "-o", path)
    made = json.loads(path.read_text())
    run = bench.skyctl("launch", path, "--steps", STEPS)
    return {
        "step_s": round(run["iteration_s"]["median"], 4),
        "predicted_s": round(made["predicted"]["iteration_s"], 4),
        "microbatches": made["problem"]["microbatches"],
        "schedule": made["problem"]["schedule"],
        "layers": [[s["start"], s["stop"]] for s in made["stages"]],
    }
