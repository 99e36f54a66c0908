"""Does the prediction of data plans hold? Eight cases over real SSH, each probed, planned, and run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from runs.data import LAN, LARGE_PICTURES, devices_of
from runs.labs import Bench, lab
from runs.machine import Case, steadily
from runs.prediction import source_of

UPLINK = """\
nodes:
  - {name: n1, cpus: 0.6, memory_gib: 4, rate_mbit: 200, site: a}
  - {name: n2, cpus: 0.4, memory_gib: 4, rate_mbit: 200, site: a}
  - {name: n3, cpus: 0.3, memory_gib: 4, rate_mbit: 100, site: b}
  - {name: n4, cpus: 0.2, memory_gib: 4, rate_mbit: 100, site: b}
sites: {latency_ms: 5, uplink_mbit: {b: 50}}
"""
CLUSTERS = {
    "LAN": LAN.replace("RATE", "1000"),
    "100 Mbit/s": LAN.replace("RATE", "100"),
    "uplink": UPLINK,
}
CASES = {
    f"{cluster}, {workload}": (cluster, workload)
    for cluster, workloads in {
        "LAN": ("gpt", "bert", "llama", "convolutional"),
        "100 Mbit/s": ("gpt", "convolutional"),
        "uplink": ("llama", "convolutional"),
    }.items()
    for workload in workloads
}
SIZES = {"LAN": (64, 16), "100 Mbit/s": (256, 32), "uplink": (256, 32)}
"""Batch size and microbatches: on slow lines a transformer of 64 samples is best left on one device."""
STEPS, LEAST_S = 6, 15.0
"""Steps of a run; more where they are short."""


def data_prediction(cases: Sequence[str] = tuple(CASES)) -> Iterator[dict[str, Any]]:
    """One figure a case."""
    for cluster, text in CLUSTERS.items():
        wanted = [CASES[name][1] for name in cases if CASES[name][0] == cluster]
        if not wanted:
            continue
        with lab(text) as bench:
            for name in wanted:
                source = source_of(bench.folder, name, LARGE_PICTURES)
                yield steadily(partial(_case, bench, cluster, name, source))


def _case(bench: Bench, cluster: str, name: str, source: str) -> Case:
    batch, microbatches = SIZES[cluster]
    sizes = ("--batch-size", batch, "--microbatches", microbatches)
    path = bench.folder / "plan.json"
    _, probing = bench.timed("probe", source, *sizes, "--refresh")
    bench.skyctl("plan", source, *sizes, "--parallel", "data", "--no-learn", "-o", path)
    made = json.loads(path.read_text())
    predicted = made["predicted"]
    steps = max(STEPS, math.ceil(LEAST_S / predicted["iteration_s"]))
    run, launching = bench.timed("launch", path, "--steps", steps, "--checkpoint-every", 0)
    measured = run["iteration_s"]["median"]
    low_s, high_s = predicted["interval"]["low_s"], predicted["interval"]["high_s"]
    figures = {
        "benchmark": "runtime",
        "section": "data-prediction",
        "cluster": cluster,
        "workload": name,
        "batch": batch,
        "microbatches": microbatches,
        "devices": devices_of(made),
        "routes": len(made["sync"]["groups"][0]["routes"]) if made.get("sync") else 0,
        "measured_s": round(measured, 4),
        "predicted_s": round(predicted["iteration_s"], 4),
        "error": round(predicted["iteration_s"] / measured - 1, 4),
        "interval_s": [round(low_s, 4), round(high_s, 4)],
        "held": low_s <= measured <= high_s,
        "sync_s": run["sync_s"],
        "predicted_sync_s": run["predicted_sync_s"],
        "compute_error": [
            round(r["predicted"]["compute_s"] / r["compute_s"] - 1, 4) for r in run["replicas"]
        ],
        "memory_error": [
            round(r["predicted"]["memory_bytes"] / r["peak_memory_bytes"] - 1, 4)
            for r in run["replicas"]
            if r["peak_memory_bytes"]
        ],
    }
    return Case(figures, probing.probed, launching.ran((steps - 1) * measured))
