"""The main job in an emulated cluster over real SSH: check, probe, compare, a long run.

Four nodes with CPU quotas of 80/40/20/20% of a core, links of 200/200/100/100 Mbit, 5 ms between two sites.
Prints one JSON line with the measured steps, the speed-ups over even, the prediction errors, the largest
relative difference of a loss between the strategies and the fastest device alone, and the long run's loss.

    sudo .venv/bin/python benchmarks/main_job.py            # about 20 minutes
    sudo .venv/bin/python benchmarks/main_job.py --quick    # a small model, a few steps
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from runs.labs import Bench, lab

LAB = """\
nodes:
  - {name: n1, cpus: 0.8, memory_gib: 3, rate_mbit: 200, site: a}
  - {name: n2, cpus: 0.4, memory_gib: 3, rate_mbit: 200, site: a}
  - {name: n3, cpus: 0.2, memory_gib: 3, rate_mbit: 100, site: b}
  - {name: n4, cpus: 0.2, memory_gib: 3, rate_mbit: 100, site: b}
sites: {latency_ms: 5}
"""
FULL = {"workload": "gpt:layers=12,hidden=256,heads=8,context=128", "batch": 32, "microbatches": 16}
SMALL = {"workload": "gpt:layers=4,hidden=128,heads=4,context=64", "batch": 16, "microbatches": 8}


def losses(measurement: Path) -> list[float]:
    """A run's loss, step by step."""
    return [step["loss"] for step in json.loads(measurement.read_text())["steps"]]


def backend_of(measurement: Path) -> str | None:
    """The backend that carried tensors between its ranks; None: its plan does not say."""
    found: str | None = json.loads(measurement.read_text()).get("backend")
    return found


def apart(runs: dict[str, list[float]]) -> float:
    """The largest relative difference of any step's loss from the one device's."""
    base = runs["alone"]
    return max(abs(a - b) / abs(b) for run in runs.values() for a, b in zip(run, base, strict=True))


def measure(bench: Bench, job: dict[str, Any], steps: int, long_steps: int, backend: str) -> dict[str, Any]:
    """The whole job in a lab that is up."""
    folder, skyctl = bench.folder, bench.skyctl
    sizes = ("--batch-size", job["batch"], "--microbatches", job["microbatches"], "--backend", backend)
    skyctl("check")
    skyctl("probe", job["workload"], *sizes, "--refresh")
    out = folder / "compared"
    compared = skyctl(
        "compare", job["workload"], *sizes, "--parallel", "pipeline", "--measure", "--steps", steps, "-o", out
    )
    rows = {row["strategy"]: row for row in compared["rows"]}
    runs = {name: losses(out / f"{name}.measurement.json") for name in rows}
    result: dict[str, Any] = {
        "benchmark": "main_job",
        "workload": job["workload"],
        "steps": steps,
        "measured_step_s": {name: row["measured"]["median"] for name, row in rows.items()},
        "predicted_step_s": {name: row["predicted_s"] for name, row in rows.items()},
        "prediction_error": {name: row["prediction_error"] for name, row in rows.items()},
        "speedup_over_even": {name: row["measured_speedup"] for name, row in rows.items()},
        "layers": {name: row["layers"] for name, row in rows.items()},
        "bound_s": rows["optimal"]["bound_s"],
        "loss_max_relative_difference": apart(runs),
        "backend": {name: backend_of(out / f"{name}.measurement.json") for name in rows},
    }
    if long_steps:
        trained = skyctl("launch", out / "optimal.plan.json", "--steps", long_steps)
        curve = [step["loss"] for step in trained["steps"]]
        result["loss"] = {"steps": long_steps, "first": curve[0], "last": curve[-1], "least": min(curve)}
    return result


def main() -> None:
    """Brings the lab up, measures, takes it down again."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a small model and a few steps")
    parser.add_argument("--steps", type=int, help="steps under each plan (default 30; quick: 5)")
    parser.add_argument("--long-steps", type=int, help="steps of the long run (default 150; quick: 0)")
    parser.add_argument("--backend", default="auto", help="what carries tensors (default: auto)")
    parser.add_argument("--keep", type=Path, help="a folder to keep the comparison in (plots, plans)")
    given = parser.parse_args()
    steps = given.steps or (5 if given.quick else 30)
    long_steps = given.long_steps if given.long_steps is not None else (0 if given.quick else 150)
    with lab(LAB) as bench:
        print(json.dumps(measure(bench, SMALL if given.quick else FULL, steps, long_steps, given.backend)))
        if given.keep is not None:
            shutil.copytree(bench.folder / "compared", given.keep, dirs_exist_ok=True)


if __name__ == "__main__":
    main()
