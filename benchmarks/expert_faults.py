"""Experts on six hosts of unequal speed that fail: accuracy, steps, and the same run again. One JSON line.

Pictures of digits, 8 × 8 with noise, come in six kinds. Each kind has a rule of its own for which digit is
which class, so experts must specialise. 64 experts, top 4, 32 pictures a step, one rank and six hosts, which
are processes of this machine, with simulated speeds. For each seed there is an undisturbed run, and one in
which 10% of the calls fail and three hosts are killed. The last of these is made again from its record.

``aborted``: steps that were not made, or made again. ``undisturbed``, ``disturbed``: by seed, the accuracy on
9,600 other pictures. ``median_s``, ``worst_s``: of steps, by kind of run over all seeds; ``deadline_s``: of a
late host. ``masked``, ``failed``, ``moved``: steps with experts masked, calls without an answer, and experts
that came back elsewhere, in all disturbed runs. ``again``: whether the losses were the same again.
Run: ``python benchmarks/expert_faults.py [--steps N] [--seeds N]``; by default 2,000 steps and three seeds.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import islice
from statistics import fmean, median
from typing import Any

import torch
from runs.expert_runs import WAIT, ExpertRuns
from torch import nn

from skyctl.checkpoint.node import safetensors
from skyctl.experts.step_record import StepRecord
from skyctl.planner.expert_placement.placement_search import place_experts
from skyctl.planner.expert_problem import ExpertLoad, PlacementProblem
from skyctl.worker.expert_orders import LEAST_WAIT_S
from skyctl.workload.recipe import Recipe
from skyctl.workload.workload import load_workload
from skyctl.workload.workload_spec import WorkloadSpec

EXPERTS, BATCH, HELD_OUT = 64, 32, 9_600
TOKEN_S = 0.002
"""Seconds a token, on a host of speed 1."""
KILLED = (1, 3, 4)
"""The places of the hosts that are killed, after a quarter of the steps each."""
SOURCE = f"""
import skyctl
import torch
from torch import nn
{WAIT}
ROWS = (  # of the digits, 5 dots wide, 7 high
    "0e11131519110e", "040c040404040e", "0e11010204081f", "1f02040201110e", "02060a121f0202",
    "1f101e0101110e", "0608101e11110e", "1f010204080808", "0e11110e11110e", "0e11110f01020c",
)
BYTES = torch.tensor([list(bytes.fromhex(rows)) for rows in ROWS])
DIGITS = BYTES.unsqueeze(-1) >> torch.arange(4, -1, -1) & 1
RULES = torch.stack([torch.randperm(10, generator=torch.Generator().manual_seed(kind)) for kind in range(6)])

def pictures(count, generator):
    kinds, digits, top, left = (torch.randint(n, (count,), generator=generator) for n in (6, 10, 2, 4))
    dots = 0.5 * torch.randn(count, 8, 8, generator=generator)
    inked = DIGITS[digits] * (0.5 + torch.rand(count, 1, 1, generator=generator))
    for n in range(count):
        dots[n, top[n] : top[n] + 7, left[n] : left[n] + 5] += inked[n]
    shown = 2.0 * nn.functional.one_hot(kinds, 6)
    return torch.cat([dots.flatten(1), shown], 1), RULES[kinds, digits]

class Expert(nn.Sequential):
    def forward(self, x):
        wait(x)
        return super().forward(x)

class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.into = nn.Linear(70, 48)
        make = lambda: Expert(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 48))
        self.experts = skyctl.Experts(make, {EXPERTS}, 4, features=48)
    def forward(self, x):
        y = self.into(x).relu()
        return y + self.experts(y), self.experts.balance_loss

class Head(nn.Linear):
    def forward(self, given):
        x, balance = given
        return super().forward(x), balance

def model():
    return [Mixture(), Head(48, 10)]

def data(batch_size, seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield pictures(batch_size, generator)

def validation(batch_size, seed):
    generator = torch.Generator().manual_seed(seed + 1000)
    while True:
        yield pictures(batch_size, generator)

def loss(outputs, targets):
    scores, balance = outputs
    return nn.functional.cross_entropy(scores, targets) + 0.01 * balance

def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=0.003)
"""


def main() -> None:
    """Makes all runs, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    recipe = Recipe(total_steps=args.steps, lr_schedule="cosine")
    kills = {args.steps * (n + 1) // 4: place for n, place in enumerate(KILLED)}
    found: dict[str, list[Any]] = {"undisturbed": [], "disturbed": []}
    accuracy: dict[str, list[float]] = {kind: [] for kind in found}
    with ExpertRuns(SOURCE, BATCH, TOKEN_S) as runs:
        loads = [ExpertLoad(f"e{n}", BATCH * 4 / EXPERTS, 1 << 16) for n in range(EXPERTS)]
        placement = place_experts(PlacementProblem(loads, runs.devices), copies=1)
        faults: dict[str, dict[str, Any]] = {
            "undisturbed": {},
            "disturbed": {"fail_every": 10, "kills": kills},
        }
        for seed in range(args.seeds):
            common: dict[str, Any] = {"seed": seed, "least_wait_s": LEAST_WAIT_S}
            for kind, options in faults.items():
                outcome = runs.run(placement, recipe, **common, **options)
                found[kind].append(outcome)
                accuracy[kind].append(_accuracy(runs.spec(seed), outcome))
                print(f"seed {seed}, {kind}: accuracy {accuracy[kind][-1]}", file=sys.stderr, flush=True)
        again = runs.run(placement, recipe, **common, record=_experts(outcome)["record"])
    times = {
        kind: [event["iteration_s"] for made in outcomes for event in made.steps[0][1:]]
        for kind, outcomes in found.items()
    }
    records = [StepRecord.from_dict(_experts(made)["record"]) for made in found["disturbed"]]
    calls = [numbers for r in records for way in (r.forwards, r.backwards) for numbers in way.values()]
    figures = {
        "steps": args.steps,
        "aborted": sum(
            args.steps - len(made.steps[0]) + sum(event.get("repeats", 0) for event in made.steps[0])
            for made in found["disturbed"]
        ),
        **accuracy,
        "median_s": {kind: round(median(values), 4) for kind, values in times.items()},
        "worst_s": {kind: round(max(values), 3) for kind, values in times.items()},
        "deadline_s": LEAST_WAIT_S,
        "masked": sum(len(record.masked_steps) for record in records),
        "failed": sum(map(len, calls)),
        "moved": sum(len(record.moves) for record in records),
        "again": again.losses == outcome.losses,
    }
    print(json.dumps(figures))


def _experts(outcome: Any) -> dict[str, Any]:
    """The record of what the rank has seen of its experts."""
    seen: dict[str, Any] = outcome.results[0]["experts"]
    return seen


def _accuracy(spec: dict[str, Any], outcome: Any) -> float:
    """Of the trained weights, in one process, on the held-out pictures."""
    workload = load_workload(WorkloadSpec.from_dict(spec))
    model = nn.Sequential(*workload.build(0, workload.layers, "cpu"))
    model.load_state_dict(safetensors.load(outcome.results[0]["weights"]))
    batches = islice(workload.validation(), HELD_OUT // BATCH)
    with torch.no_grad():
        right = [
            (model(inputs)[0].argmax(1) == targets).double().mean().item() for inputs, targets in batches
        ]
    return round(fmean(right), 4)


if __name__ == "__main__":
    main()
