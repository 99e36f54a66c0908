"""Trials of a script packed by ``skyctl sweep``, beside the same trials one after the other.

Simulated: 300 trials on devices of unequal speed, by the queue that real sweeps use, beside the fastest
device alone and beside the least that any order could take. Real: 30 trials that compute for half of their
time and wait for data in the other half, four of them sharing a device, beside a loop in a shell. Prints one
JSON line.

    .venv/bin/python benchmarks/sweep.py      # about 2 minutes
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.helpers.simulated_sweeps import least_makespan_s, play_sweep

SIMULATED, REAL, PER_DEVICE, SEEDS = 300, 30, 4, 20
SPEEDS = {"n1/cpu:0": 4.0, "n2/cpu:0": 2.0, "n3/cpu:0": 1.0, "n4/cpu:0": 1.0}
TRIAL = """\
import argparse, json, time
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--width", type=int)
given = parser.parse_args()
for step in range(given.width):
    until = time.process_time() + 0.05
    while time.process_time() < until:
        pass
    time.sleep(0.05)  # waits for data
    print(json.dumps({"step": step, "loss": given.lr / (step + 1)}), flush=True)
"""
RATES = ("1e-4", "2e-4", "3e-4", "4e-4", "5e-4", "6e-4", "7e-4", "8e-4", "9e-4", "1e-3")
STEPS = ("6", "12", "18")


def simulated(seed: int) -> tuple[float, float]:
    """Times as fast as the fastest device alone, and as the least that there could be."""
    generator = random.Random(seed)
    trials = [
        {"width": str(generator.choice((64, 128, 256, 512))), "lr": f"{generator.uniform(1e-4, 1e-2):.3g}"}
        for _ in range(SIMULATED)
    ]

    def takes(parameters: dict[str, str], device: str) -> float:
        return int(parameters["width"]) / 64 / SPEEDS[device]

    packed_s = play_sweep(trials, SPEEDS, takes).makespan_s  # type: ignore[arg-type]
    alone_s = sum(takes(trial, "n1/cpu:0") for trial in trials)
    least_s = least_makespan_s(trials, SPEEDS, takes)  # type: ignore[arg-type]
    return alone_s / packed_s, least_s / packed_s


def real() -> dict[str, float]:
    """Seconds of the same trials in a loop, and in a sweep."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made, "work")
        folder.mkdir()
        (folder / "trial.py").write_text(TRIAL)
        (folder / "cluster.yaml").write_text(
            "name: one\nnodes:\n  - {name: a, transport: local, threads: 1}\n"
        )
        env = {**os.environ, "SKYCTL_HOME": str(Path(made, "state"))}
        began = time.monotonic()
        for rate in RATES:
            for steps in STEPS:
                words = [sys.executable, "trial.py", f"--lr={rate}", f"--width={steps}"]
                subprocess.run(words, cwd=folder, env=env, check=True, stdout=subprocess.DEVNULL)
        alone_s = time.monotonic() - began
        words = [sys.executable, "-m", "skyctl", "sweep", "trial.py", "--json", "--metric", "loss"]
        words += ["--grid", f"lr={','.join(RATES)}", "--grid", f"width={','.join(STEPS)}"]
        began = time.monotonic()
        done = subprocess.run(
            [*words, "--per-device", str(PER_DEVICE)],
            cwd=folder,
            env=env,
            check=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        packed_s = time.monotonic() - began
        trials = json.loads(done.stdout)["trials"]
    if len(trials) != REAL or any(trial["status"] != "done" for trial in trials):
        raise SystemExit(f"not all {REAL} trials are done: {trials}")
    return {"one_after_the_other_s": alone_s, "sweep_s": packed_s, "ratio": alone_s / packed_s}


def main() -> None:
    """Simulates, measures, prints."""
    ratios = [simulated(seed) for seed in range(SEEDS)]
    found = {
        "benchmark": "sweep",
        "processors": len(os.sched_getaffinity(0)),
        "simulated": {
            "trials": SIMULATED,
            "over_fastest_alone": round(median(ratio for ratio, _ in ratios), 3),
            "of_least_possible_worst": round(min(part for _, part in ratios), 4),
        },
        "real": {"trials": REAL, "per_device": PER_DEVICE, **{k: round(v, 2) for k, v in real().items()}},
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
