"""Experts on six hosts of unequal speed, on this machine: placed by speed, and evenly. Prints one JSON line.

64 experts, top 4, 256 tokens a step, one rank and six hosts, which are processes of this machine. The speeds
80, 40, 20, 20, 10 and 10 are simulated: an expert sleeps for each token. ``even_s``, ``placed_s``: the median
step with ``even_placement``, and with ``place_experts`` by the tokens of the run before.
``even_over_placed``: the one ÷ the other; ``predicted``: the same by the placements' own times, without lines
and the trunk.
Run: ``python benchmarks/experts.py``.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.worker import driver
from tests.worker.expert_hosts import HostPool, Hosts, recipe, spec_of

from skyctl.planner.expert_placement.placement_search import even_placement, place_experts
from skyctl.planner.expert_problem import ExpertDevice, ExpertLoad, ExpertPlacement, PlacementProblem

SPEEDS = (80, 40, 20, 20, 10, 10)
EXPERTS, STEPS, TOKENS = 64, 12, 256
TOKEN_S = 0.03
"""Seconds a token, on a host of speed 1."""
SLEEP = "SKYCTL_BENCHMARK_TOKEN_S"
SOURCE = f"""
import os, time
import skyctl
import torch
from torch import nn

class Sleeper(nn.Linear):
    def forward(self, x):
        time.sleep(len(x) * float(os.environ.get("{SLEEP}", "0")))
        return super().forward(x)

class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = skyctl.Experts(lambda: Sleeper(16, 16), {EXPERTS}, 4, features=16)
    def forward(self, x):
        return x + self.experts(x), self.experts.balance_loss

class Head(nn.Linear):
    def forward(self, given):
        x, balance = given
        return super().forward(x), balance

def model():
    return [Mixture(), Head(16, 3)]

def data(batch_size, seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 16, generator=generator)
        yield x, x[:, :3].argmax(1)

def loss(outputs, targets):
    scores, balance = outputs
    return nn.functional.cross_entropy(scores, targets) + 0.01 * balance
"""


def main() -> None:
    """Measures both placements, one after the other."""
    devices = [ExpertDevice(f"d{n}", TOKEN_S / speed, 1 << 30) for n, speed in enumerate(SPEEDS)]
    with tempfile.TemporaryDirectory(prefix="skyctl-bench-") as name:
        folder = Path(name)
        path = folder / "train.py"
        path.write_text(SOURCE)
        pool = driver.Pool(1, folder)
        host_pool = HostPool(folder, len(SPEEDS), lambda place: {SLEEP: str(TOKEN_S / SPEEDS[place])})
        try:
            loads = [ExpertLoad(f"e{number}", 1.0, 1 << 16) for number in range(EXPERTS)]
            even = even_placement(PlacementProblem(loads, devices))
            even_s, tokens = _steps(pool, host_pool, path, _holders(even))
            loads = [ExpertLoad(f"e{n}", count / STEPS, 1 << 16) for n, count in enumerate(tokens)]
            problem = PlacementProblem(loads, devices)
            placed = place_experts(problem)
            placed_s, _ = _steps(pool, host_pool, path, _holders(placed))
        finally:
            pool.close()
            host_pool.close()
    figures = {
        "even_s": even_s,
        "placed_s": placed_s,
        "even_over_placed": even_s / placed_s,
        "predicted": even_placement(problem).time_s / placed.time_s,
    }
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))


def _holders(placement: ExpertPlacement) -> list[int]:
    """Of each expert its host's place; one that is split is on the host with the larger share."""
    return [int(max(shares, key=lambda name: (shares[name], name))[1:]) for shares in placement.shares]


def _steps(
    pool: driver.Pool, host_pool: HostPool, path: Path, holders: Sequence[int]
) -> tuple[float, list[int]]:
    """(the median seconds of a step, by expert the tokens of all steps)."""
    orders = driver.orders(spec_of(path, TOKENS), [0, 2], 1, "1f1b", STEPS, recipe=recipe(STEPS))
    with Hosts(orders, {0: holders}, host_pool.take(len(SPEEDS))) as hosts:
        outcome = pool.run(hosts.orders)
    assert not outcome.errors, outcome.errors
    times = [event["iteration_s"] for event in outcome.steps[0][1:]]
    return median(times), outcome.results[0]["experts"]["tokens"]["0"]


if __name__ == "__main__":
    main()
