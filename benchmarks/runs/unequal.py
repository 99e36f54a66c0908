"""Four unequal nodes over real SSH: is the step near what its plan's devices and links allow?"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from runs.bounds import bound_s, utilisation
from runs.labs import Bench, lab
from runs.machine import Case, steadily

LAB = """\
nodes:
  - {name: n1, cpus: 0.8, memory_gib: 4, rate_mbit: 100}
  - {name: n2, cpus: 0.4, memory_gib: 4, rate_mbit: 100}
  - {name: n3, cpus: 0.2, memory_gib: 4, rate_mbit: 50}
  - {name: n4, cpus: 0.2, memory_gib: 4, rate_mbit: 20}
"""
WORKLOADS = (
    "gpt:layers=12,hidden=256,heads=8,context=128",
    "bert:layers=12,hidden=256,heads=8,context=128",
)
BATCH, MICROBATCHES = 64, 32
STEPS = 6


def unequal(workloads: Sequence[str] = WORKLOADS, extra: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """One figure a workload. ``extra``: more flags for plan (a schedule, say)."""
    with lab(LAB) as bench:
        for workload in workloads:
            yield steadily(partial(_case, bench, workload, extra))


def _case(bench: Bench, workload: str, extra: Sequence[str]) -> Case:
    sizes = ("--batch-size", BATCH, "--microbatches", MICROBATCHES)
    path = bench.folder / "plan.json"
    _, probing = bench.timed("probe", workload, *sizes, "--refresh")
    bench.skyctl("plan", workload, *sizes, "--parallel", "pipeline", "--no-learn", *extra, "-o", path)
    made = json.loads(path.read_text())
    run, launching = bench.timed("launch", path, "--steps", STEPS)
    measured = run["iteration_s"]["median"]
    bound = bound_s(made)
    figures = {
        "benchmark": "runtime",
        "section": "unequal",
        "workload": workload,
        "microbatches": MICROBATCHES,
        "schedule": made["problem"]["schedule"],
        "stages": [
            [s["replicas"][0]["device"], s["start"], s["stop"], s["replicas"][0]["in_flight"]]
            for s in made["stages"]
        ],
        "measured_s": round(measured, 4),
        "predicted_s": round(made["predicted"]["iteration_s"], 4),
        "bound_s": round(bound, 4),
        "of_bound": round(measured / bound, 4),
        "prediction_error": round(made["predicted"]["iteration_s"] / measured - 1, 4),
        "utilisation": round(utilisation(made, measured), 4),
        "replicas": run["replicas"],
    }
    return Case(figures, probing.probed, launching.ran((STEPS - 1) * measured))
