"""Does the prediction hold? Twelve cases over real SSH: three clusters, four workloads, probed and run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from runs.labs import Bench, lab
from runs.machine import Case, steadily

CLUSTERS = {
    "80/40/20/20%, LAN": """\
nodes:
  - {name: n1, cpus: 0.8, memory_gib: 4, rate_mbit: 1000}
  - {name: n2, cpus: 0.4, memory_gib: 4, rate_mbit: 1000}
  - {name: n3, cpus: 0.2, memory_gib: 4, rate_mbit: 1000}
  - {name: n4, cpus: 0.2, memory_gib: 4, rate_mbit: 1000}
""",
    "70/35/35%, 20 ms": """\
nodes:
  - {name: n1, cpus: 0.7, memory_gib: 4, rate_mbit: 200, site: a}
  - {name: n2, cpus: 0.35, memory_gib: 4, rate_mbit: 200, site: a}
  - {name: n3, cpus: 0.35, memory_gib: 4, rate_mbit: 200, site: b}
sites: {latency_ms: 20}
""",
    "40/40/30/20/20/10%, uplink": """\
nodes:
  - {name: n1, cpus: 0.4, memory_gib: 3, rate_mbit: 200, site: a}
  - {name: n2, cpus: 0.4, memory_gib: 3, rate_mbit: 200, site: a}
  - {name: n3, cpus: 0.3, memory_gib: 3, rate_mbit: 100, site: a}
  - {name: n4, cpus: 0.2, memory_gib: 3, rate_mbit: 100, site: b}
  - {name: n5, cpus: 0.2, memory_gib: 3, rate_mbit: 50, site: b}
  - {name: n6, cpus: 0.1, memory_gib: 3, rate_mbit: 50, site: b}
sites: {latency_ms: 5, uplink_mbit: {b: 50}}
""",
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "vocab_size": 1024,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
CONVOLUTIONAL = '''
"""A convolutional net whose layers pass (features, shortcut) on."""
import torch
from torch import nn

class Stem(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 32, 3, padding=1)
    def forward(self, images):
        features = self.conv(images).relu()
        return features, features

class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(8, 32)
        self.conv = nn.Conv2d(32, 32, 3, padding=1)
    def forward(self, given):
        features, shortcut = given
        return self.conv(self.norm(features).relu()), shortcut

class Join(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(8, 32)
        self.conv = nn.Conv2d(32, 32, 3, padding=1)
    def forward(self, given):
        features, shortcut = given
        features = self.conv(self.norm(features).relu()) + shortcut
        return features, features

class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 10)
    def forward(self, given):
        return self.linear(given[0].mean((2, 3)))

def model():
    return [Stem(), *(layer for _ in range(8) for layer in (Body(), Join())), Head()]

def data(batch_size, seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        images = torch.randn(batch_size, 3, 32, 32, generator=generator)
        yield images, torch.randint(0, 10, (batch_size,), generator=generator)
'''
WORKLOADS = ("gpt", "bert", "llama", "convolutional")
BATCH, MICROBATCHES = 32, 16
STEPS, LEAST_S = 6, 15.0
"""Steps of a run; more where they are short."""


def prediction(
    clusters: Sequence[str] = tuple(CLUSTERS), workloads: Sequence[str] = WORKLOADS
) -> Iterator[dict[str, Any]]:
    """One figure a case."""
    for cluster in clusters:
        with lab(CLUSTERS[cluster]) as bench:
            for name in workloads:
                yield steadily(partial(_case, bench, cluster, name, source_of(bench.folder, name)))


def source_of(folder: Path, name: str, convolutional: str = CONVOLUTIONAL) -> str:
    """The one of ``WORKLOADS`` that a command is to train; ``convolutional``: that workload's train.py."""
    if name in ("gpt", "bert"):
        return f"{name}:layers=12,hidden=256,heads=8,context=128"
    place = folder / name
    place.mkdir(exist_ok=True)
    if name == "llama":
        (place / "config.json").write_text(json.dumps(LLAMA))
        return f"hf:{place}"
    (place / "train.py").write_text(convolutional)
    return str(place / "train.py")


def _case(bench: Bench, cluster: str, name: str, source: str) -> Case:
    sizes = ("--batch-size", BATCH, "--microbatches", MICROBATCHES)
    path = bench.folder / "plan.json"
    _, probing = bench.timed("probe", source, *sizes, "--refresh")
    bench.skyctl("plan", source, *sizes, "--parallel", "pipeline", "-o", path)
    made = json.loads(path.read_text())
    steps = max(STEPS, math.ceil(LEAST_S / made["predicted"]["iteration_s"]))
    run, launching = bench.timed("launch", path, "--steps", steps)
    measured = run["iteration_s"]["median"]
    memory = [
        r["predicted"]["memory_bytes"] / r["peak_memory_bytes"] - 1
        for r in run["replicas"]
        if r["peak_memory_bytes"]
    ]
    figures = {
        "benchmark": "runtime",
        "section": "prediction",
        "cluster": cluster,
        "workload": name,
        "schedule": made["problem"]["schedule"],
        "stages": [[s["replicas"][0]["device"], s["start"], s["stop"]] for s in made["stages"]],
        "measured_s": round(measured, 4),
        "predicted_s": round(made["predicted"]["iteration_s"], 4),
        "error": round(made["predicted"]["iteration_s"] / measured - 1, 4),
        "compute_error": [
            round(r["predicted"]["compute_s"] / r["compute_s"] - 1, 4) for r in run["replicas"]
        ],
        "memory_error": [round(error, 4) for error in memory],
    }
    return Case(figures, probing.probed, launching.ran((steps - 1) * measured))
