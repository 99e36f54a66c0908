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
from statistics import median

from runs.expert_runs import WAIT, ExpertRuns

from skyctl.planner.expert_placement.placement_search import even_placement, place_experts
from skyctl.planner.expert_problem import ExpertLoad, ExpertPlacement, PlacementProblem
from skyctl.workload.recipe import Recipe

EXPERTS, STEPS, TOKENS = 64, 12, 256
TOKEN_S = 0.03
"""Seconds a token, on a host of speed 1."""
SOURCE = f"""
import skyctl
import torch
from torch import nn
{WAIT}
class Sleeper(nn.Linear):
    def forward(self, x):
        wait(x)
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
    with ExpertRuns(SOURCE, TOKENS, TOKEN_S) as runs:

        def steps(placement: ExpertPlacement) -> tuple[float, list[int]]:
            """(the median seconds of a step, by expert the tokens of all steps)."""
            outcome = runs.run(placement, Recipe(total_steps=STEPS))
            times = [event["iteration_s"] for event in outcome.steps[0][1:]]
            tokens: list[int] = outcome.results[0]["experts"]["tokens"]["0"]
            return median(times), tokens

        loads = [ExpertLoad(f"e{number}", 1.0, 1 << 16) for number in range(EXPERTS)]
        even = even_placement(PlacementProblem(loads, runs.devices))
        even_s, tokens = steps(even)
        loads = [ExpertLoad(f"e{n}", count / STEPS, 1 << 16) for n, count in enumerate(tokens)]
        problem = PlacementProblem(loads, runs.devices)
        placed = place_experts(problem)
        placed_s, _ = steps(placed)
    figures = {
        "even_s": even_s,
        "placed_s": placed_s,
        "even_over_placed": even_s / placed_s,
        "predicted": even_placement(problem).time_s / placed.time_s,
    }
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
