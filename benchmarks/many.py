"""64 workers on this machine: a BERT of 160 encoders, 322 layers, probed, planned, launched, trained.

Every node is local, one thread, slowed down by a factor of the paper's draw; the model has toy width. Two
cores can't show 64 speeds, so nothing is said of speed-ups. The benchmark shows that it works, how long each
command takes, and how long a run takes to start. It also shows how far the machine's available memory falls,
and that the losses are those of one device. One JSON line; about ten minutes on two cores.

    python benchmarks/many.py
    python benchmarks/many.py --workers 16 --encoders 40 --steps 5
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from probes.duration import Lowest
from runs.labs import Bench

from skyctl.paper.paper_experiment import slowdown_factors

SIZES = "hidden=32,heads=4,context=32"
BATCH, MICROBATCHES = 16, 8
EVERYBODY = ("--objective", "bottleneck")
"""A step's least time leaves a few of the slowest out; the least slowest stage gives everybody a part."""

ALONE = "w01"


class FirstStep:
    """When the first step of the next run that appears in a state folder was done."""

    def __init__(self, state: Path) -> None:
        self._runs = state / "runs"
        self._known = set(self._runs.glob("*"))
        self.begun_s = time.monotonic()
        self.done_s: float | None = None
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while not self._over.wait(0.05):
            for run in set(self._runs.glob("*")) - self._known:
                steps = run / "metrics.jsonl"
                if steps.is_file() and steps.stat().st_size:
                    self.done_s = time.monotonic() - self.begun_s
                    return

    def __enter__(self) -> FirstStep:
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._watch.join()


def many(bench: Bench, workers: int, encoders: int, steps: int) -> dict[str, Any]:
    """The whole job; a dictionary of figures."""
    workload = f"bert:layers={encoders},{SIZES}"
    sizes = ("--batch-size", BATCH, "--microbatches", MICROBATCHES)
    seconds: dict[str, float] = {}
    fell: dict[str, float] = {}
    begun = time.monotonic()

    def timed(name: str, *arguments: object) -> Any:
        start = time.monotonic()
        with Lowest() as memory:
            found = bench.skyctl(*arguments)
        seconds[name] = round(time.monotonic() - start, 1)
        fell[name] = round((memory.first - memory.lowest) / 2**30, 2)
        return found

    plan, one = bench.folder / "plan.json", bench.folder / "one.plan.json"
    profile = timed("probe", "probe", workload, *sizes)
    made = timed("plan", "plan", workload, *sizes, *EVERYBODY, "-o", plan)
    with FirstStep(Path(bench.env["SKYCTL_HOME"])) as first:
        run = timed("launch", "launch", plan, "--steps", steps)
    layers = made["stages"][-1]["stop"]
    bench.skyctl("plan", workload, *sizes, "--assign", f"{ALONE}=0:{layers}", "-o", one)
    alone = timed("one device", "launch", one, "--steps", steps)
    trained_s = sum(step["iteration_s"] for step in run["steps"])
    return {
        "benchmark": "many",
        "workers": workers,
        "profiled": len(profile["devices"]),
        "links": len(profile["links"]),
        "workload": workload,
        "layers": layers,
        "stages": len(made["stages"]),
        "schedule": made["problem"]["schedule"],
        "steps": len(run["steps"]),
        "attempts": run["attempts"],
        "seconds": seconds,
        "whole_s": round(time.monotonic() - begun, 1),
        "first_step_after_s": None if first.done_s is None else round(first.done_s, 1),
        "start_up_s": None
        if first.done_s is None
        else round(first.done_s - run["steps"][0]["iteration_s"], 1),
        "training_s": round(trained_s, 1),
        "after_training_s": round(
            seconds["launch"] - trained_s - (first.done_s or 0.0) + run["steps"][0]["iteration_s"], 1
        ),
        "step_s": round(run["iteration_s"]["median"], 3),
        "predicted_s": round(run["predicted_iteration_s"], 3),
        "memory_fell_gib": fell,
        "loss": [run["steps"][0]["loss"], run["final_loss"]],
        "loss_max_relative_difference": max(
            abs(a["loss"] - b["loss"]) / abs(b["loss"])
            for a, b in zip(run["steps"], alone["steps"], strict=True)
        ),
        "cores": len(os.sched_getaffinity(0)),
    }


def main() -> None:
    """In a state folder and with a cluster.yaml of its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--encoders", type=int, default=160)
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="skyctl-bench-") as name:
        folder = Path(name)
        nodes = "".join(
            f"  - {{name: w{i:02d}, transport: local, threads: 1, slowdown: {factor}}}\n"
            for i, factor in enumerate(slowdown_factors(given.workers + 1), start=1)
        )
        (folder / "cluster.yaml").write_text(f"name: many\nnodes:\n{nodes}")
        env = {"SKYCTL_HOME": str(folder / "state"), "SKYCTL_CLUSTER": str(folder / "cluster.yaml")}
        bench = Bench(folder, {**os.environ, **env})
        print(json.dumps(many(bench, given.workers, given.encoders, given.steps)), flush=True)


if __name__ == "__main__":
    main()
