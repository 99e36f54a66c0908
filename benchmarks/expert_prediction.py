"""Does the predicted step hold where experts are on hosts? Six cases on this machine; prints one JSON line.

One or two stages, two pipelines side by side, two to six hosts of unequal speed. All nodes are processes of
this machine. Hosts take 8 to 32 times as long for each computation, so that they rest most of the time. One
probe gives all figures, so the machine has to be as busy then as later. ``error``: predicted ÷ measured − 1,
of the median step, predicted with the loads that the gate brought about. ``even_error``: of the prediction
made before the start, for even loads.
Run: ``python benchmarks/expert_prediction.py``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from runs.labs import Bench, local_nodes

SLOWDOWNS = {"t1": 1, "t2": 1, "h1": 8, "h2": 16, "h3": 16, "h4": 32, "h5": 32, "h6": 32}
BATCH, MICROBATCHES, STEPS = 16, 4, 12
ALONE = ("--assign", "t1=0:4")
TWO_STAGES = ("--schedule", "1f1b", "--assign", "t1=0:2,t2=2:4")
SIDE_BY_SIDE = ("--parallel", "data", "--assign", "t1=2,t2=2")
CASES: dict[str, tuple[tuple[str, ...], str]] = {
    "one stage, 2 hosts": (ALONE, "h1,h2"),
    "one stage, 6 hosts": (ALONE, "h1,h2,h3,h4,h5,h6"),
    "two stages, 2 hosts": (TWO_STAGES, "h1,h2"),
    "two stages, 4 hosts": (TWO_STAGES, "h1,h2,h3,h4"),
    "two pipelines, 2 hosts": (SIDE_BY_SIDE, "h1,h2"),
    "two pipelines, 4 hosts": (SIDE_BY_SIDE, "h1,h2,h3,h4"),
}
SOURCE = """
import skyctl
import torch
from torch import nn

class First(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y, y.new_zeros(())

class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.before = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
        make = lambda: nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
        self.experts = skyctl.Experts(make, experts=8, top_k=2, features=256)
    def forward(self, given):
        x, balance = given
        x = x + self.before(x)
        return x + self.experts(x), balance + self.experts.balance_loss

class Head(nn.Linear):
    def forward(self, given):
        x, balance = given
        return super().forward(x.mean(1)), balance

def model():
    return [First(64, 256), Mixture(), Mixture(), Head(256, 3)]

def data(batch_size, seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 64, 64, generator=generator)
        yield x, x[:, 0, :3].argmax(1)

def loss(outputs, targets):
    scores, balance = outputs
    return nn.functional.cross_entropy(scores, targets) + 0.01 * balance
"""


def cases(bench: Bench, names: list[str]) -> Iterator[dict[str, Any]]:
    """Probes once, then plans and runs each."""
    path = bench.folder / "train.py"
    path.write_text(SOURCE)
    sizes = ("--batch-size", BATCH, "--microbatches", MICROBATCHES)
    bench.skyctl("probe", path, *sizes, "--links", "none")
    for name in names:
        words, hosts = CASES[name]
        plan = bench.folder / "plan.json"
        bench.skyctl("plan", path, *sizes, *words, "-o", plan)
        run = bench.skyctl("launch", plan, "--steps", STEPS, "--expert-hosts", hosts)
        measured, before = run["iteration_s"]["median"], run["predicted_iteration_s"]
        record = Path(bench.env["SKYCTL_HOME"], "runs", run["run_id"], "experts.json")
        predicted = json.loads(record.read_text())["predicted_iteration_s"]
        yield {
            "case": name,
            "predicted_s": round(predicted, 4),
            "measured_s": round(measured, 4),
            "error": round(predicted / measured - 1, 4),
            "even_error": round(before / measured - 1, 4),
        }


def main() -> None:
    """Runs the cases asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--case", action="append", choices=list(CASES), help="default: all")
    nodes = "".join(
        f"  - {{name: {name}, transport: local, threads: 1, memory_gib: 2, slowdown: {slowdown}}}\n"
        for name, slowdown in SLOWDOWNS.items()
    )
    with local_nodes(f"name: here\nnodes:\n{nodes}") as bench:
        found = list(cases(bench, parser.parse_args().case or list(CASES)))
    errors = [abs(case["error"]) for case in found]
    summary = {"median": median(errors), "worst": max(errors)}
    print(json.dumps({"benchmark": "expert_prediction", "cases": found} | summary))


if __name__ == "__main__":
    main()
