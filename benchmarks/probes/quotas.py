"""Do times follow the quotas, and what the nodes really do? Is a neighbour that eats half of one noticed?

In labs, over real SSH.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

from runs.labs import Bench, lab

QUOTAS = {"n1": 0.6, "n2": 0.4, "n3": 0.3, "n4": 0.2, "n5": 0.1}
WORKLOAD = ("gpt:layers=4,hidden=128,heads=4,context=64", "--batch-size", 32, "--microbatches", 8)
CHURN = '''
"""Layers that compute on a few kilobytes: what they take hardly depends on what lies in the caches."""
import torch
from torch import nn

class Churn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return churn(x, weight)
    @staticmethod
    def backward(ctx, gradient):
        (weight,) = ctx.saved_tensors
        return churn(churn(gradient, weight), weight), torch.zeros_like(weight)

def churn(x, weight):
    out = x.clone()
    for _ in range(400):
        torch.mm(x, weight, out=out)
    return out

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(64))
    def forward(self, x):
        return Churn.apply(x, self.weight)

def model():
    return [Layer(), nn.Sequential(Layer(), Layer()), nn.Sequential(Layer(), nn.Linear(64, 10))]

def data(batch_size, seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        targets = torch.randint(0, 10, (batch_size,), generator=generator)
        yield torch.randn(batch_size, 64, generator=generator), targets
'''
SLICES = "cpu_slice_ms: 10\n"
RUNS, MOST_RUNS = 3, 8
SAME_SPEED = 0.12
"""Spread of the fastest node's layers while the core keeps its speed; it is 3–10% then, and 15–40% else."""
MICROBATCH = 64
SPIN = """import os, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
print('busy', flush=True)
while True: pass
"""
"""Until its stdin is closed: what was started through nsenter is not ended with it."""


PLAIN_S = 25.0
PLAIN = """import sys, time
import torch
torch.set_num_threads(1)
module = {"__name__": "train"}
exec(sys.argv[1], module)
layers = module["model"]()
inputs, targets = next(iter(module["data"](int(sys.argv[2]), 0)))
def once():
    out = inputs
    for layer in layers:
        out = layer(out)
    torch.nn.functional.cross_entropy(out, targets).backward()
for _ in range(3):
    once()
print("ready", flush=True)
sys.stdin.readline()
start, done = time.monotonic(), 0
while time.monotonic() - start < float(sys.argv[3]):
    once()
    done += 1
print((time.monotonic() - start) / done)
"""
"""A loop over the layers, without skyctl: wall seconds of a forward and a backward."""


def quotas() -> Iterator[dict[str, Any]]:
    """For each layer and pair of nodes: how far the ratio of times is from the quotas' inverse ratio.

    Of layers that stay in the first cache, which nothing but the quotas makes differ: with slices of 10 ms on
    all nodes (what a tenth of a core gets of a container's usual period of 100 ms); there with all of the
    lab on one core as well (half the quotas, or it would not hold them), until three probes have found the
    core at one speed (``spread``; all are told). And with the lab's usual periods of 10 ms, where the less a
    node has of it, the colder are its caches. Beside it, a plain loop, which has nothing of a probe, says how
    far the nodes themselves are from their quotas (``plain_…``). At the end of a transformer, which pays most
    for cold caches.
    """
    with lab(_lab(QUOTAS, SLICES)) as bench:
        for run in range(RUNS):
            times, figures = _probed(bench, QUOTAS, _churn(bench))
            yield _case("all cores, slices of 10 ms", run) | figures | _against_plain(bench, times)
    half = {node: cpus / 2 for node, cpus in QUOTAS.items()}
    with lab(_lab(half, SLICES), core=min(os.sched_getaffinity(0))) as bench:
        calm = 0
        for run in range(MOST_RUNS):
            times, figures = _probed(bench, half, _churn(bench))
            yield _case("one core, slices of 10 ms", run) | figures
            calm += figures["spread"] <= SAME_SPEED
            if calm == RUNS:
                break
    with lab(_lab(QUOTAS)) as bench:
        times, figures = _probed(bench, QUOTAS, _churn(bench))
        yield _case("all cores, periods of 10 ms", 0) | figures | _against_plain(bench, times)
        times, figures = _probed(bench, QUOTAS, WORKLOAD)
        yield _case("all cores, periods of 10 ms", 0) | figures


def _lab(quotas: Mapping[str, float], more: str = "") -> str:
    nodes = "".join(f"  - {{name: {n}, cpus: {cpus}, memory_gib: 2}}\n" for n, cpus in quotas.items())
    return f"nodes:\n{nodes}{more}"


def _churn(bench: Bench) -> tuple[object, ...]:
    train = bench.folder / "train.py"
    train.write_text(CHURN)
    return (train, "--batch-size", MICROBATCH * 8, "--microbatches", 8)


def _case(where: str, run: int) -> dict[str, Any]:
    return {"benchmark": "probing", "section": "quotas", "lab": where, "run": run}


def _probed(
    bench: Bench, quotas: Mapping[str, float], workload: Sequence[object]
) -> tuple[dict[str, dict[str, float]], dict[str, Any]]:
    """Seconds by node and layer, and how they compare."""
    profile = bench.skyctl("probe", *workload, "--refresh")
    times = _layer_seconds(profile)
    errors = [
        times[a][layer] / times[b][layer] / (quotas[b] / quotas[a]) - 1
        for a, b in combinations(quotas, 2)
        for layer in times[a]
    ]
    return times, {
        "workload": Path(str(workload[0])).name,
        "pairs": len(errors),
        "worst": round(max(map(abs, errors)), 4),
        "median": round(median(map(abs, errors)), 4),
        "by_node": {n: round(_pace(times, n), 4) for n in quotas},
        "spread": _spread(profile, max(quotas, key=lambda node: quotas[node])),
        "widest_interval": _widest(profile),
        "notes": _notes(profile),
    }


def _against_plain(bench: Bench, times: dict[str, dict[str, float]]) -> dict[str, Any]:
    """The same layers in a plain loop on all nodes at once, and what the probe's times are of its."""
    words = [sys.executable, "-c", PLAIN, CHURN, str(MICROBATCH), str(PLAIN_S)]
    loops = {node: bench.start_in(node, words) for node in QUOTAS}
    for loop in loops.values():
        assert loop.stdin is not None
        loop.stdin.write(b"go\n")
        loop.stdin.flush()
    seconds = {node: float(loop.communicate()[0]) for node, loop in loops.items()}
    found = {n: sum(times[n].values()) / seconds[n] for n in QUOTAS}
    plain = {n: {"all": seconds[n]} for n in QUOTAS}
    return {
        "plain_worst_from_quotas": round(
            max(
                abs(seconds[a] / seconds[b] / (QUOTAS[b] / QUOTAS[a]) - 1) for a, b in combinations(QUOTAS, 2)
            ),
            4,
        ),
        "plain_by_node": {n: round(_pace(plain, n), 4) for n in QUOTAS},
        "probe_of_plain": {n: round(ratio, 4) for n, ratio in found.items()},
        "worst_from_plain": round(max(found.values()) / min(found.values()) - 1, 4),
    }


def busy() -> Iterator[dict[str, Any]]:
    """Half of one node is eaten by another process; the one beside it is quiet."""
    two = "nodes:\n  - {name: eaten, cpus: 0.5, memory_gib: 2}\n  - {name: quiet, cpus: 0.5, memory_gib: 2}\n"
    with lab(two) as bench:
        for loaded in (True, False):
            spinner = bench.start_in("eaten", ["python3", "-c", SPIN]) if loaded else None
            try:
                profile = bench.skyctl("probe", *WORKLOAD, "--refresh")
            finally:
                if spinner is not None:
                    spinner.communicate()
            yield {
                "benchmark": "probing",
                "section": "busy",
                "loaded": loaded,
                "share": {d["node"]: (d.get("conditions") or {}).get("share") for d in profile["devices"]},
                "notes": _notes(profile),
            }


def _layer_seconds(profile: dict[str, Any]) -> dict[str, dict[str, float]]:
    """By node and layer: forward + backward."""
    return {
        device["node"]: {t["signature"]: t["forward_s"] + t["backward_s"] for t in device["timings"]}
        for device in profile["devices"]
    }


def _pace(times: dict[str, dict[str, float]], node: str) -> float:
    """A node's seconds times its quota, against the median of all nodes (1: as the quotas say)."""
    ratios = []
    for layer, seconds in times[node].items():
        usual = median(times[n][layer] * QUOTAS[n] for n in QUOTAS)
        ratios.append(seconds * QUOTAS[node] / usual)
    return median(ratios)


def _widest(profile: dict[str, Any]) -> float | None:
    found = [t["interval"] for d in profile["devices"] for t in d["timings"] if t.get("interval") is not None]
    return round(max(found), 4) if found else None


def _spread(profile: dict[str, Any], node: str) -> float:
    """The median of its layers' spreads."""
    found = [t["spread"] for d in profile["devices"] if d["node"] == node for t in d["timings"]]
    return float(round(median(found), 4))


def _notes(profile: dict[str, Any]) -> dict[str, list[str]]:
    return {d["node"]: list((d.get("conditions") or {}).get("notes") or ()) for d in profile["devices"]}
