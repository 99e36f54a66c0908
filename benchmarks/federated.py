"""Eight small owners by skyctl and by Flower's gRPC, side by side: seconds of a round, and the same weights.

Each owner makes a few local steps of SGD on data of its own, then weights are averaged (FedAvg). Both read
one file, so batches and first weights are the same. Runs take turns; figures are medians over all rounds but
each run's first. Prints one JSON line.

    python benchmarks/federated.py --flower PYTHON     # that PYTHON has flwr and torch
    python benchmarks/federated.py                     # skyctl alone
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from safetensors.torch import load_file

PROGRAM = Path(__file__).parent / "runs" / "federated_flower.py"
OWNERS, STEPS, BATCH = 8, 5, 10
WORKLOAD = """\
import torch
from torch import nn


def model():
    layer = nn.Linear(60, 10)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return [layer]


def data(batch_size, seed, owner):
    generator = torch.Generator().manual_seed(int(owner.removeprefix("n")))
    while True:
        inputs = torch.randn(batch_size, 60, generator=generator)
        yield inputs, inputs[:, :10].argmax(1)


def example(batch_size):
    return torch.zeros(batch_size, 60), torch.zeros(batch_size, dtype=torch.long)


def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets)


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.05)
"""


def by_skyctl(folder: Path, rounds: int) -> dict[str, Any]:
    """A run's rounds, its whole seconds, and the weights that it ends with."""
    nodes = "".join(
        f"  - {{name: n{number}, transport: local, threads: 1, memory_gib: 0.5}}\n"
        for number in range(OWNERS)
    )
    (folder / "cluster.yaml").write_text(f"name: owners\nnodes:\n{nodes}")
    env = os.environ | {"SKYCTL_HOME": str(folder / "home"), "XDG_CACHE_HOME": str(folder / "cache")}

    def skyctl(*words: str) -> str:
        words = (sys.executable, "-m", "skyctl", *words)
        done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, check=True)
        return done.stdout

    sizes = ("--batch-size", str(BATCH), "--microbatches", "1")
    if not (folder / "plan.json").exists():
        skyctl("probe", "train.py", *sizes)
        skyctl(
            *("plan", "train.py", *sizes, "--owners", "all", "--local-steps", str(STEPS), "-o", "plan.json")
        )
    began = time.perf_counter()
    done = json.loads(
        skyctl("launch", "plan.json", "--steps", str(rounds), "--checkpoint-every", "0", "--json")
    )
    whole_s = time.perf_counter() - began
    weights = load_file(done["weights"])
    return {
        "rounds_s": [step["iteration_s"] for step in done["steps"][1:]],
        "whole_s": whole_s,
        "weights": [value for _, value in sorted(weights.items())],
    }


def by_flower(python: str, folder: Path, rounds: int) -> dict[str, Any]:
    """The same by a Flower server and clients over gRPC, each a process."""
    words = [python, str(PROGRAM), str(folder / "train.py"), str(OWNERS), str(STEPS), str(BATCH), str(rounds)]
    began = time.perf_counter()
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**told, "whole_s": time.perf_counter() - began}


def main() -> None:
    """Runs them in turns and compares."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--flower", metavar="PYTHON", help="an interpreter that has flwr and torch")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {}
    with TemporaryDirectory(prefix="skyctl-owners-") as name:
        folder = Path(name)
        (folder / "train.py").write_text(WORKLOAD)
        for _ in range(given.turns):
            found.setdefault("skyctl", []).append(by_skyctl(folder, given.rounds))
            if given.flower:
                found.setdefault("flower", []).append(by_flower(given.flower, folder, given.rounds))
    told: dict[str, Any] = {"benchmark": "federated", "owners": OWNERS, "local_steps": STEPS}
    for name, runs in found.items():
        told[name] = {
            "round_s": round(median(second for run in runs for second in run["rounds_s"]), 4),
            "rounds_s": [round(median(run["rounds_s"]), 4) for run in runs],
            "whole_s": round(median(run["whole_s"] for run in runs), 2),
        }
    if given.flower:
        told["ratio"] = round(told["skyctl"]["round_s"] / told["flower"]["round_s"], 3)
        told["weights_apart"] = _apart(found["skyctl"][0]["weights"], found["flower"][0]["weights"])
    print(json.dumps(told))


def _apart(ours: list[Any], theirs: list[list[Any]]) -> float:
    """The largest difference of a weight; tensors by name: bias, then weight."""
    return max(
        float((one - one.new_tensor(other)).abs().max()) for one, other in zip(ours, theirs, strict=True)
    )


if __name__ == "__main__":
    main()
