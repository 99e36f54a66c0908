"""Rounds on this machine's own nodes: predicted and measured, one JSON line a case.

Layers sleep, so that several nodes do not slow each other down where processors are few; what is left over is
skyctl's own work and the average of the weights. Measured is the median round but the first.

    python benchmarks/rounds.py
    python benchmarks/rounds.py --rounds 40 --only owners
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SIZES = ("--batch-size", "16", "--microbatches", "4")
CASES = {
    # a seconds of sleep by node, and what is asked for
    "owners": ("--local-steps", "8", "--owners", "a,b,c"),
    "owners in proportion": ("--local-steps", "12,6,4", "--owners", "a,b,c", "--prox-mu", "0.1"),
    "a pipeline for c and d": ("--local-steps", "5", "--owners", "a,b,c+d"),
    "two of three owners": ("--local-steps", "6", "--owners", "a,b,c", "--clients-per-round", "2"),
    "common batches": ("--local-steps", "6", "--limit", "a,b,c"),
}
SLEEP_S = {"a": 0.002, "b": 0.004, "c": 0.006, "d": 0.006}
TRAIN = """\
import os
import time

import torch
from torch import nn

SLEEP_S = float(os.environ.get("SLEEP_S", "0"))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(256, 256)

    def forward(self, x):
        time.sleep(SLEEP_S)
        return x + torch.tanh(self.linear(x))


def model():
    return [Layer() for _ in range(8)] + [nn.Linear(256, 4)]


def data(batch_size, seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 256, generator=generator)
        yield x, x[:, :4].argmax(1)


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.05)
"""


def main() -> int:
    """Plans and trains each case; exit 1 where one failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", choices=sorted(CASES), action="append")
    given = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory(prefix="skyctl-rounds-") as name:
        folder = Path(name)
        (folder / "train.py").write_text(TRAIN)
        nodes = "".join(
            f"  - {{name: {node}, transport: local, threads: 1, env: {{SLEEP_S: '{sleep_s}'}}}}\n"
            for node, sleep_s in SLEEP_S.items()
        )
        (folder / "cluster.yaml").write_text(f"name: here\nnodes:\n{nodes}")
        _skyctl(folder, "probe", "train.py", *SIZES)
        for case in given.only or CASES:
            try:
                print(json.dumps(_measure(folder, case, given.rounds)), flush=True)
            except subprocess.CalledProcessError as exc:
                print(json.dumps({"case": case, "error": exc.stderr[-2000:]}), flush=True)
                failed = True
    return int(failed)


def _measure(folder: Path, case: str, rounds: int) -> dict[str, object]:
    _skyctl(folder, "plan", "train.py", *SIZES, *CASES[case], "-o", "plan.json")
    words = ("--steps", str(rounds), "--checkpoint-every", "0", "--json")
    done = json.loads(_skyctl(folder, "launch", "plan.json", *words))
    plan = json.loads((folder / "plan.json").read_text())
    measured, predicted = done["iteration_s"]["median"], done["predicted_iteration_s"]
    return {
        "case": case,
        "local_steps": [pipeline["local_steps"] for pipeline in plan["pipelines"]],
        "stages": [len(pipeline["stages"]) for pipeline in plan["pipelines"]],
        "predicted_s": round(predicted, 4),
        "measured_s": round(measured, 4),
        "off": round(measured / predicted - 1, 3),
        "p10_s": round(done["iteration_s"]["p10"], 4),
        "p90_s": round(done["iteration_s"]["p90"], 4),
    }


def _skyctl(folder: Path, *words: str) -> str:
    """Runs a command and returns the text that it printed. Raises CalledProcessError where it failed."""
    environment = os.environ | {"SKYCTL_HOME": str(folder / "home"), "XDG_CACHE_HOME": str(folder / "cache")}
    done = subprocess.run(
        [sys.executable, "-m", "skyctl", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
