"""Do the intervals hold? Twelve cases on each of five kinds of machine, with cores kept awake and without.

An interval is to hold the measured median in eight cases of ten: on a lab with nothing else to do, with
another process on a node, under quotas of 10 and of 100 ms, and on nodes without any quota. Each case is
probed, planned and run; its line is kept in a record, so that the table goes on where it was stopped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from runs.awake import Awake
from runs.labs import Bench, lab, local_nodes
from runs.prediction import CONVOLUTIONAL, LLAMA

RECORD = Path("build/coverage.jsonl")
STEPS, MOST_STEPS, LEAST_S = 8, 300, 6.0
"""Steps of a run: so many at least, more where they are short."""
BUSY_SEED = 7
BURSTS = """import os, random, sys, threading, time
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
print('busy', flush=True)
draw = random.Random(int(sys.argv[1]))
while True:
    end = time.monotonic() + draw.uniform(0.05, 1.0)
    while time.monotonic() < end: pass
    time.sleep(draw.uniform(0.05, 1.0))
"""
"""Works half of the time, for a random part of a second each, until its stdin is closed."""


@dataclass(frozen=True)
class Kind:
    """A kind of machine: by name the labs (or clusters of local nodes) that stand for it.

    ``busy``: another process works on the first node of each.
    """

    clusters: dict[str, str]
    local: bool = False
    busy: bool = False


def _lab(cpus: Sequence[float], rate_mbit: int, more: str = "") -> str:
    nodes = (
        f"  - {{name: n{i}, cpus: {share}, memory_gib: 3, rate_mbit: {rate_mbit}, site: {'ab'[i % 2]}}}\n"
        for i, share in enumerate(cpus, 1)
    )
    return f"nodes:\n{''.join(nodes)}{more}"


def _local(slowdowns: Sequence[float]) -> str:
    nodes = (
        f"  - {{name: n{i}, transport: local, threads: 1, slowdown: {slowdown}}}\n"
        for i, slowdown in enumerate(slowdowns, 1)
    )
    return f"name: local\nnodes:\n{''.join(nodes)}"


IDLE = {
    "80/40%, 1 Gbit/s": _lab((0.8, 0.4), 1000),
    "80/40/20%, 200 Mbit/s, 5 ms": _lab((0.8, 0.4, 0.2), 200, "sites: {latency_ms: 5}\n"),
}
KINDS = {
    "idle": Kind(IDLE),
    "another process": Kind(IDLE, busy=True),
    "quotas of 10 ms": Kind(
        {
            "30/12%, 1 Gbit/s": _lab((0.3, 0.12), 1000),
            "40/20/12%, 100 Mbit/s, 2 ms": _lab((0.4, 0.2, 0.12), 100, "sites: {latency_ms: 2}\n"),
        }
    ),
    "quotas of 100 ms": Kind(
        {
            "60/25%, 1 Gbit/s": _lab((0.6, 0.25), 1000, "cpu_period_ms: 100\n"),
            "70/35/12%, 100 Mbit/s, 2 ms": _lab(
                (0.7, 0.35, 0.12), 100, "cpu_period_ms: 100\nsites: {latency_ms: 2}\n"
            ),
        }
    ),
    "no quota": Kind({"1×/2×, local": _local((1, 2)), "1×/1.5×, local": _local((1, 1.5))}, local=True),
}
TOY = '''
"""A step of some milliseconds."""
import torch
from torch import nn

def model():
    return [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)] + [nn.Linear(64, 10)]

def data(batch_size, seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        targets = torch.randint(0, 10, (batch_size,), generator=generator)
        yield torch.randn(batch_size, 64, generator=generator), targets
'''
WORKLOADS: dict[str, tuple[str, int, int]] = {
    "toy": (TOY, 32, 4),
    "tiny gpt": ("gpt:layers=4,hidden=64,heads=4,context=32", 16, 4),
    "convolutional": (CONVOLUTIONAL, 16, 8),
    "gpt": ("gpt:layers=8,hidden=128,heads=4,context=64", 32, 8),
    "llama": (json.dumps(LLAMA | {"num_hidden_layers": 6}), 16, 8),
    "bert": ("bert:layers=12,hidden=256,heads=8,context=128", 16, 8),
}
"""By name: what is trained (a source, a train.py's or a config.json's text), batch size, microbatches."""
TOYS = ("toy", "tiny gpt")


def coverage(record: Path = RECORD, kinds: Sequence[str] = tuple(KINDS)) -> Iterator[dict[str, Any]]:
    """A line a case, and at the end one a kind, with cores awake and without."""
    done = read_record(record)
    for kind in kinds:
        for cluster, text in KINDS[kind].clusters.items():
            left = [
                (workload, awake)
                for workload in WORKLOADS
                for awake in (True, False)
                if (kind, cluster, workload, awake) not in done
            ]
            for line in _cases(kind, cluster, text, left) if left else ():
                record.parent.mkdir(parents=True, exist_ok=True)
                with record.open("a") as file:
                    file.write(json.dumps(line) + "\n")
    done = read_record(record)
    yield from done.values()
    yield from (summary(kind, awake, list(done.values())) for awake in (True, False) for kind in kinds)


def read_record(record: Path) -> dict[tuple[str, str, str, bool], dict[str, Any]]:
    """The record's cases; of one that was run twice the last."""
    lines = record.read_text().splitlines() if record.exists() else []
    found = map(json.loads, lines)
    return {(one["kind"], one["cluster"], one["workload"], one["awake"]): one for one in found}


def summary(kind: str, awake: bool, cases: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a kind's intervals held, how far the points were off, how wide the intervals are."""
    mine = [one for one in cases if (one["kind"], one["awake"]) == (kind, awake)]
    errors = {
        name: [abs(one["error"]) for one in mine if (one["workload"] in TOYS) == (name == "toys")]
        for name in ("steps", "toys")
    }
    return {
        "benchmark": "runtime",
        "section": "coverage",
        "kind": kind,
        "awake": awake,
        "cases": len(mine),
        "held": sum(one["held"] for one in mine),
        "median_error": round(median(errors["steps"] or [0.0]), 4),
        "worst_error": max(errors["steps"], default=None),
        "worst_toy": max(errors["toys"], default=None),
        "median_half_width": round(median([one["half_width"] for one in mine] or [0.0]), 4),
    }


def _cases(kind: str, cluster: str, text: str, left: Sequence[tuple[str, bool]]) -> Iterator[dict[str, Any]]:
    machines = KINDS[kind]
    with local_nodes(text) if machines.local else lab(text) as bench:
        burner = None
        if machines.busy:
            burner = bench.start_in("n1", ["python3", "-c", BURSTS, str(BUSY_SEED)])
        try:
            for workload, awake in left:
                kept: AbstractContextManager[Any] = Awake() if awake else nullcontext()
                with kept:
                    found = _case(bench, workload)
                about = {"kind": kind, "cluster": cluster, "workload": workload, "awake": awake}
                yield {"benchmark": "runtime", "section": "coverage"} | about | found
        finally:
            if burner is not None:
                burner.communicate()


def _case(bench: Bench, name: str) -> dict[str, Any]:
    text, batch, microbatches = WORKLOADS[name]
    source = _source(bench.folder, name.replace(" ", "-"), text)
    sizes = ("--batch-size", batch, "--microbatches", microbatches)
    path = bench.folder / "plan.json"
    bench.skyctl("probe", source, *sizes, "--refresh")
    # --no-learn: each case is to be of its own probe, not of the run before
    bench.skyctl("plan", source, *sizes, "--parallel", "pipeline", "--no-learn", "-o", path)
    predicted = json.loads(path.read_text())["predicted"]
    step_s, interval = predicted["iteration_s"], predicted["interval"]
    steps = min(MOST_STEPS, max(STEPS, math.ceil(LEAST_S / step_s)))
    run = bench.skyctl("launch", path, "--steps", steps)
    measured_s = run["iteration_s"]["median"]
    return {
        "stages": len(run["replicas"]),
        "predicted_s": round(step_s, 5),
        "low_s": round(interval["low_s"], 5),
        "high_s": round(interval["high_s"], 5),
        "measured_s": round(measured_s, 5),
        "p10_s": round(run["iteration_s"]["p10"], 5),
        "p90_s": round(run["iteration_s"]["p90"], 5),
        "error": round(step_s / measured_s - 1, 4),
        "held": interval["low_s"] <= measured_s <= interval["high_s"],
        "half_width": round((interval["high_s"] - interval["low_s"]) / 2 / step_s, 4),
        "compute": [round(r["compute_s"] / r["predicted"]["compute_s"], 3) for r in run["replicas"]],
        "beside_layers_s": [[round(one, 5) for one in _beside(r)] for r in run["replicas"]],
    }


def _beside(replica: dict[str, Any]) -> tuple[float, float]:
    """(measured, predicted) seconds a step of computing that is not the layers'."""
    names = ("forward_s", "backward_s", "optimizer_s")
    measured = replica["compute_s"] - sum(replica[name] or 0.0 for name in names)
    predicted = replica["predicted"]["compute_s"] - sum(replica["predicted"][name] or 0.0 for name in names)
    return measured, predicted


def _source(folder: Path, name: str, text: str) -> str:
    if ":layers=" in text:
        return text
    place = folder / name
    place.mkdir(exist_ok=True)
    if text.startswith("{"):
        (place / "config.json").write_text(text)
        return f"hf:{place}"
    (place / "train.py").write_text(text)
    return str(place / "train.py")
