"""Sums beside the next step's computing: how long steps take with a delay and without, and losses.

Two nodes hold all layers and have four microbatches each; their link is as fast as makes the sum take about
as long as the computing. Layers sleep a known time, or are a GPT's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from runs.labs import Bench, lab, local_nodes

LAB = """\
nodes:
  - {{name: n1, cpus: 0.3, memory_gib: 4, rate_mbit: {rate}}}
  - {{name: n2, cpus: 0.3, memory_gib: 4, rate_mbit: {rate}}}
"""
LOCAL = """\
nodes:
  - {name: n1, transport: local, threads: 1}
  - {name: n2, transport: local, threads: 1}
"""
GPT = "gpt:layers=4,hidden=128,heads=4,context=64"
SIZES = ("--batch-size", 16, "--microbatches", 8)
LARGER = ("--batch-size", 64, "--microbatches", 8)
"""Of the GPT: sums take the processor as long as with smaller batches, and computing four times as long."""
SHARES = ("--parallel", "data", "--assign", "n1=4,n2=4")
DELAYS: dict[str, tuple[object, ...]] = {"undelayed": (), "delayed": ("--sync-delay", 1)}
WARMED = {**DELAYS, "after 40": ("--sync-delay", 1, "--undelayed-steps", 40)}
"""ZeRO-Offload begins with delayed updates after 40 steps, too (Ren et al. 2021)."""
TURNS, STEPS = 2, 12
TOLERATED, LEAST_GAIN = 1.10, 1.5
"""A step may be so many times as long as the longer of computing and sum; undelayed ÷ delayed at least."""
LOSS_STEPS, LAST = 200, 10
MOST_LOSS = 0.02
LAYERS, FORWARD_S, BACKWARD_S, LAYER_BYTES = 4, 0.02, 0.04, 1_250_000
SLEEPING = f'''
"""Layers that sleep a known time, with gradients of a known size."""
import time
import torch
from torch import nn

class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        time.sleep({FORWARD_S})
        return x + 0.0

    @staticmethod
    def backward(ctx, gradient):
        time.sleep({BACKWARD_S})
        (weight,) = ctx.saved_tensors
        return gradient, torch.full_like(weight, 1e-3)

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros({LAYER_BYTES // 4}))

    def forward(self, x):
        return Sleep.apply(x, self.weight)

def model():
    return [*(Layer() for _ in range({LAYERS})), nn.Linear(4, 3)]

def data(batch_size, seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 4, generator=generator)
        yield x, torch.randint(3, (batch_size,), generator=generator)

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.01)
'''
SLEEPING_MBIT = 40
"""5 MB take 1 s; four microbatches of four layers 0.96 s."""
GPT_MBIT = 1000
"""Of the lab in which the GPT is measured first."""
CASES = ("sleeping", "gpt", "gpt-larger-batch", "loss")


def delay(cases: Sequence[str] = CASES) -> Iterator[dict[str, Any]]:
    """One figure a case."""
    measure: dict[str, Callable[[], dict[str, Any]]] = {
        "sleeping": _sleeping,
        "gpt": lambda: _gpt(SIZES),
        "gpt-larger-batch": lambda: _gpt(LARGER),
        "loss": _loss,
    }
    for case in cases:
        yield {"benchmark": "delay", "case": case, **measure[case]()}


def _sleeping() -> dict[str, Any]:
    with lab(LAB.format(rate=SLEEPING_MBIT)) as bench:
        path = bench.folder / "train.py"
        path.write_text(SLEEPING)
        return _compared(bench, str(path), SIZES)


def _gpt(sizes: Sequence[object]) -> dict[str, Any]:
    """The link's rate is made of what the model takes in a lab with a fast one."""
    with lab(LAB.format(rate=GPT_MBIT)) as bench:
        bench.skyctl("probe", GPT, *sizes)
        plan = _plan(bench, GPT, sizes, "undelayed")
    compute_s = max(one["compute_s"] for one in plan["predicted"]["replicas"])
    rate = max(1, round(8e-6 * _gradient_bytes(plan) / compute_s))
    with lab(LAB.format(rate=rate)) as bench:
        return {"rate_mbit": rate, **_compared(bench, GPT, sizes)}


def _loss() -> dict[str, Any]:
    """Losses of the same holders, with and without: means of the last steps."""
    with local_nodes(LOCAL) as bench:
        bench.skyctl("probe", GPT, *SIZES)
        found = {}
        for name in WARMED:
            _plan(bench, GPT, SIZES, name)
            run = bench.skyctl(
                "launch", bench.folder / f"{name}.json", "--steps", LOSS_STEPS, "--checkpoint-every", 0
            )
            losses = [step["loss"] for step in run["steps"]]
            found[name] = fmean(losses[-LAST:])
        off = {name: round(loss / found["undelayed"] - 1, 4) for name, loss in found.items()}
        return {"steps": LOSS_STEPS, "losses": found, "off": off, "ok": abs(off["after 40"]) <= MOST_LOSS}


def _compared(bench: Bench, source: str, sizes: Sequence[object]) -> dict[str, Any]:
    """Runs with and without a delay in turns; seconds are medians of the steps but each run's first two."""
    bench.skyctl("probe", source, *sizes)
    plans = {name: _plan(bench, source, sizes, name) for name in DELAYS}
    took: dict[str, list[float]] = {name: [] for name in plans}
    busy_s: dict[str, list[float]] = {name: [] for name in plans}
    waited_s: dict[str, list[float]] = {name: [] for name in plans}
    for _ in range(TURNS):
        for name in plans:
            run = bench.skyctl(
                "launch", bench.folder / f"{name}.json", "--steps", STEPS, "--checkpoint-every", 0
            )
            took[name] += [step["iteration_s"] for step in run["steps"][2:-1]]
            busy_s[name].append(max(one["compute_s"] for one in run["replicas"]))
            waited_s[name].append(run["sync_s"])
    measured = {name: median(seconds) for name, seconds in took.items()}
    said = [
        max(one["compute_s"] for one in plans[name]["predicted"]["replicas"])
        for name in ("undelayed", "delayed")
    ]
    processor_s, compute_s, sum_s = (
        said[1] - said[0],
        median(busy_s["undelayed"]),
        _sum_s(plans["delayed"]),
    )
    longer_s = max(compute_s + processor_s, sum_s)
    gain = measured["undelayed"] / measured["delayed"]
    return {
        "compute_s": round(compute_s, 4),
        "processor_s": round(processor_s, 4),
        "sum_s": round(sum_s, 4),
        "steps": {
            name: {
                "predicted_s": round(plan["predicted"]["iteration_s"], 4),
                "measured_s": round(measured[name], 4),
                "error": round(plan["predicted"]["iteration_s"] / measured[name] - 1, 4),
                "busy_s": round(median(busy_s[name]), 4),
                "sync_s": round(median(waited_s[name]), 4),
            }
            for name, plan in plans.items()
        },
        "of_longer": round(measured["delayed"] / longer_s, 3),
        "gain": round(gain, 3),
        "ok": measured["delayed"] <= TOLERATED * longer_s and gain >= LEAST_GAIN,
    }


def _plan(bench: Bench, source: str, sizes: Sequence[object], name: str) -> dict[str, Any]:
    path: Path = bench.folder / f"{name}.json"
    bench.skyctl("plan", source, *sizes, *SHARES, *WARMED[name], "--no-learn", "-o", path)
    plan: dict[str, Any] = json.loads(path.read_text())
    return plan


def _gradient_bytes(plan: dict[str, Any]) -> float:
    return float(sum(layer["gradient_bytes"] for layer in plan["problem"]["layers"]))


def _sum_s(plan: dict[str, Any]) -> float:
    """The whole sum's seconds by the plan's figures: every byte each way, on the slower one, and latency."""
    links = [link for link in plan["problem"]["links"] if {link["source"], link["target"]} <= _holders(plan)]
    slowest = float(min(link["bandwidth_bytes_per_s"] for link in links))
    return _gradient_bytes(plan) / slowest + float(sum(link["latency_s"] for link in links))


def _holders(plan: dict[str, Any]) -> set[str]:
    return {one["stages"][0]["device"] for one in plan["pipelines"]}
