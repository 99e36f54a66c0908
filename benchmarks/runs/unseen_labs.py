"""Labs and workloads that the model of time was not made in: what is predicted there, and what it takes.

Each lab is probed once for a workload. Then the best plan of every form is made without what runs have shown,
and run; sums alone are measured by ``bench-sync``. A form is a pipeline, data parallelism, a hybrid, data
parallelism with delayed or stale sums, or rounds.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from tests.lab import fault_injection

from runs.labs import Bench, lab, local_nodes

STEPS, MOST_STEPS, LEAST_S = 12, 200, 8.0
"""Steps of a run: so many at least, more where they are short."""
BURSTS = """import os, random, sys, threading, time
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
print('busy', flush=True)
draw = random.Random(int(sys.argv[1]))
while True:
    end = time.monotonic() + draw.uniform(0.05, 1.0)
    while time.monotonic() < end: pass
    time.sleep(draw.uniform(0.05, 1.0))
"""
"""Works half of the time, for a random part of a second each, until its stdin is closed."""
FORMS: dict[str, tuple[object, ...]] = {
    "pipeline": ("--parallel", "pipeline"),
    "data": ("--parallel", "data"),
    "hybrid": ("--parallel", "hybrid"),
    "delayed": ("--parallel", "data", "--sync-delay", 1),
    "stale": ("--parallel", "data", "--staleness", 3),
    "rounds": ("--local-steps", 8),
}
Disturb = Callable[[Bench], None]
"""Does something to the lab again and again, from a thread of its own."""

CONVOLUTIONAL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm = nn.GroupNorm(8, outputs)
    def forward(self, images):
        return self.norm(self.conv(images)).relu()

class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.classes = nn.Linear(64, 10)
    def forward(self, images):
        return self.classes(images.mean((2, 3)))

def model():
    sizes = [3, 24, 48, 48, 64, 64]
    return [Block(a, b) for a, b in zip(sizes, sizes[1:])] + [Head()]

def data(batch_size, seed):
    draw = torch.Generator().manual_seed(seed)
    while True:
        LOADS
        images = torch.randn(batch_size, 3, 20, 20, generator=draw)
        yield images, torch.randint(0, 10, (batch_size,), generator=draw)

def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets)
"""
SKIPS = """
import torch
from torch import nn

class Skip(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(288), nn.Linear(288, 288)
    def forward(self, x):
        return x + self.linear(self.norm(x)).relu()

def model():
    return [nn.Linear(48, 288), *[Skip() for _ in range(14)], nn.Linear(288, 12)]

def data(batch_size, seed):
    draw = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(batch_size, 48, generator=draw), torch.randint(0, 12, (batch_size,), generator=draw)

def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets)
"""
SOFTMAX = """
import torch
from torch import nn

def model():
    return [nn.Linear(90, 12)]

def data(batch_size, seed):
    draw = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(batch_size, 90, generator=draw), torch.randint(0, 12, (batch_size,), generator=draw)

def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets)
"""
STALLS = """
import random, time
import torch
from torch import nn

class Stalls(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.draw = random.Random(time.time_ns())
    def forward(self, x):
        time.sleep(0.3 if self.draw.random() < 0.15 else 0.04)
        return self.linear(x)

def model():
    return [Stalls(), nn.Linear(32, 10)]

def data(batch_size, seed):
    draw = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(batch_size, 32, generator=draw), torch.randint(0, 10, (batch_size,), generator=draw)

def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets)
"""
SLEEPS = """
import time
import torch
from torch import nn

class Nap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        time.sleep(0.022)
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.045)
        return gradient.clone()

class Sleeps(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
    def forward(self, x):
        return Nap.apply(x * self.scale)

def model():
    return [Sleeps() for _ in range(3)]

def data(batch_size, seed):
    while True:
        yield torch.ones(batch_size, 60000), torch.zeros(batch_size)

def loss(outputs, targets):
    return (outputs.mean(1) - targets).square().mean()
"""


@dataclass(frozen=True)
class UnseenLab:
    """One lab and what runs in it.

    Attributes:
        cluster: a lab.yaml, or a cluster.yaml of local nodes.
        source: a workload as it is typed, or a train.py's text; None: sums alone.
        sizes: batch size and microbatches.
        forms: of ``FORMS``.
        sums: megabytes, and the ways to sum that are measured.
        disturb: what is done to it from before the probe until the last run has ended.
        by_mean: a run's mean step is what counts, since steps are uneven by nature.
    """

    cluster: str
    source: str | None = None
    sizes: tuple[int, int] = (32, 8)
    forms: tuple[str, ...] = ()
    sums: tuple[int, str] | None = None
    disturb: Disturb | None = None
    by_mean: bool = False

    @property
    def is_local(self) -> bool:
        """Whether its nodes are this machine's own processes."""
        return "transport: local" in self.cluster


def _nodes(cpus: Sequence[float], rates: Sequence[float], sites: str = "", more: str = "") -> str:
    lines = [
        f"  - {{name: n{i}, cpus: {share}, memory_gib: 3, rate_mbit: {rate}{site}}}\n"
        for i, (share, rate) in enumerate(zip(cpus, rates, strict=True), 1)
        for site in [f", site: {sites[i - 1]}" if sites else ""]
    ]
    return f"nodes:\n{''.join(lines)}{more}"


def _local(count: int, more: str = "") -> str:
    nodes = "".join(f"  - {{name: n{i}, transport: local{more}}}\n" for i in range(1, count + 1))
    return f"name: local\nnodes:\n{nodes}"


def _mesh(rates: dict[tuple[int, int], float], latency_ms: float = 0.2) -> str:
    lines = [
        f"  - {{between: [n{a}, n{b}], rate_mbit: {rate}, latency_ms: {latency_ms}}}\n"
        for (a, b), rate in rates.items()
    ]
    return f"links:\n{''.join(lines)}"


def _change_rate(bench: Bench) -> None:
    for rate in (24.0, 60.0):
        fault_injection.set_rate(bench.lab_state(), "n2", rate)
        time.sleep(10)


def _throttle(bench: Bench) -> None:
    time.sleep(60)
    fault_injection.set_cpus(bench.lab_state(), "n1", 0.4)
    time.sleep(3600)


LABS: dict[str, UnseenLab] = {
    "a mesh": UnseenLab(
        _nodes(
            [0.4] * 4,
            [1000] * 4,
            "",
            _mesh({(1, 2): 30, (2, 3): 30, (3, 4): 30, (1, 4): 6, (1, 3): 16, (2, 4): 16}),
        ),
        sums=(6, "auto,ring"),
    ),
    "two sites": UnseenLab(
        _nodes(
            (0.55, 0.5, 0.35, 0.18),
            [500] * 4,
            "aabb",
            "sites: {latency_ms: 1, uplink_mbit: {a: 32, b: 32}}\n",
        ),
        "gpt:layers=6,hidden=160,heads=4,context=48",
        (32, 8),
        ("data", "pipeline", "hybrid", "delayed"),
    ),
    "local owners": UnseenLab(_local(6), SOFTMAX, (600, 6), ("rounds",)),
    "stalls": UnseenLab(_local(4), STALLS, (32, 4), ("stale", "data", "rounds"), by_mean=True),
    "periods of 100 ms": UnseenLab(
        _nodes((0.65, 0.35, 0.2), (90, 90, 40), "", "cpu_period_ms: 100\n"),
        SKIPS,
        (384, 12),
        ("pipeline", "data", "hybrid", "delayed"),
    ),
    "periods of 10 ms": UnseenLab(
        _nodes((0.65, 0.35, 0.2, 0.12), (90, 90, 40, 40)),
        SKIPS,
        (384, 12),
        ("pipeline", "data", "hybrid", "delayed"),
    ),
    "local sums": UnseenLab(_local(3), sums=(24, "ring,trees")),
    "layers that sleep": UnseenLab(
        _nodes((0.7, 0.7), (50, 50), "", "cpu_period_ms: 20\n"), SLEEPS, (16, 16), ("pipeline", "data")
    ),
    "a convolutional net": UnseenLab(
        _nodes((0.75, 0.45, 0.25, 0.15), [900] * 4, "", "cpu_period_ms: 20\n"),
        CONVOLUTIONAL.replace("LOADS", "pass"),
        (64, 16),
        ("data", "pipeline", "hybrid", "delayed", "rounds"),
    ),
    "a busy node": UnseenLab(
        _nodes((0.6, 0.5, 0.3), [400] * 3),
        "gpt:layers=5,hidden=128,heads=4,context=64",
        (32, 8),
        ("pipeline", "data", "hybrid", "delayed"),
    ),
    "wireless": UnseenLab(
        _nodes((0.6, 0.6, 0.4), (200, 60, 200)),
        "gpt:layers=5,hidden=96,heads=4,context=64",
        (48, 8),
        ("data", "pipeline", "delayed", "rounds"),
        disturb=_change_rate,
    ),
    "fewer threads": UnseenLab(
        _local(2, ", threads: 1"),
        CONVOLUTIONAL.replace("LOADS", "pass"),
        (32, 8),
        ("data", "pipeline", "rounds"),
    ),
    "a tunnel": UnseenLab(
        _nodes((0.5, 0.4, 0.4), [1000] * 3, "", _mesh({(1, 2): 45, (2, 3): 25, (1, 3): 45}, 6)),
        "gpt:layers=5,hidden=128,heads=4,context=48",
        (32, 8),
        ("pipeline", "data", "hybrid", "delayed", "rounds"),
    ),
    "two ranks on a node": UnseenLab(
        "name: local\nnodes:\n  - {name: n1, transport: local, threads: 1}\n"
        "  - {name: n2, transport: local, threads: 1}\n  - {name: n3, transport: local, threads: 1}\n",
        "gpt:layers=4,hidden=128,heads=4,context=64",
        (24, 6),
        ("data", "pipeline", "hybrid", "delayed"),
    ),
    "one uplink for two sites": UnseenLab(
        _nodes(
            (0.5, 0.5, 0.4, 0.3),
            [500] * 4,
            "aabc",
            "sites: {latency_ms: 3, uplink_mbit: {a: 40, b: 25, c: 25}}\n",
        ),
        "gpt:layers=5,hidden=128,heads=4,context=48",
        (32, 8),
        ("data", "pipeline", "hybrid", "delayed", "rounds"),
    ),
    "a slow disk": UnseenLab(
        _nodes((0.7, 0.5), (300, 300)),
        CONVOLUTIONAL.replace("LOADS", "__import__('time').sleep(0.03)"),
        (32, 8),
        ("data", "pipeline", "hybrid", "delayed"),
    ),
    "throttled after a minute": UnseenLab(
        _nodes((0.8, 0.5), (300, 300)),
        "gpt:layers=4,hidden=128,heads=4,context=64",
        (24, 6),
        ("data", "pipeline", "hybrid", "delayed"),
        disturb=_throttle,
    ),
}
"""By what is odd about each: eight like labs where predictions had failed, and new kinds."""


def unseen_labs(wanted: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A line a prediction; one a lab, of how the form that a trial chooses compares with the fastest."""
    for name in wanted:
        yield from _lab_lines(name, LABS[name])


def summary(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How far the predictions were off, and how many intervals held."""
    errors = [one["error"] for one in lines if "error" in one]
    held = [one["held"] for one in lines if "held" in one]
    chosen = [one["of_fastest"] for one in lines if "of_fastest" in one]
    return {
        "predictions": len(errors),
        "median_error": round(median(map(abs, errors)), 4),
        "worst_error": max(errors, key=abs),
        "signed_median": round(median(errors), 4),
        "held": round(fmean(held), 3) if held else None,
        "worst_choice": max(chosen, default=None),
    }


def _lab_lines(name: str, about: UnseenLab) -> Iterator[dict[str, Any]]:
    up = local_nodes(about.cluster) if about.is_local else lab(about.cluster)
    with up as bench, _disturbed(bench, about.disturb):
        burner = bench.start_in("n1", ["python3", "-c", BURSTS, "5"]) if name == "a busy node" else None
        try:
            if about.sums is not None:
                megabytes, ways = about.sums
                for row in bench.skyctl(
                    "bench-sync", "--bytes", f"{megabytes}MB", "--sync", ways, "--repeat", 8, "-y"
                )["rows"]:
                    yield _line(name, f"sum: {row['sync']}", row["predicted_s"], row["measured_s"], None)
            if about.source is not None:
                yield from _form_lines(bench, name, about, about.source)
        finally:
            if burner is not None:
                burner.communicate()


@contextmanager
def _disturbed(bench: Bench, disturb: Disturb | None) -> Iterator[None]:
    """Disturbs the lab meanwhile, over and over."""
    if disturb is None:
        with nullcontext():
            yield
        return

    def go_on() -> None:
        while True:
            try:
                disturb(bench)
            except Exception:  # noqa: BLE001 - the lab is gone
                return

    threading.Thread(target=go_on, daemon=True).start()
    yield


def _form_lines(bench: Bench, name: str, about: UnseenLab, source: str) -> Iterator[dict[str, Any]]:
    if "\n" in source:
        path = bench.folder / "train.py"
        path.write_text(source)
        source = str(path)
    sizes = ("--batch-size", about.sizes[0], "--microbatches", about.sizes[1])
    begun = time.monotonic()
    bench.skyctl("probe", source, *sizes)
    probe_s = time.monotonic() - begun
    found: dict[str, tuple[dict[str, Any], float]] = {}
    for form in about.forms:
        plan = bench.folder / f"{form}.json"
        bench.skyctl("plan", source, *sizes, *FORMS[form], "--no-learn", "-o", plan, ok=(0, 3))
        if not plan.exists():
            continue
        predicted = json.loads(plan.read_text())["predicted"]
        per_step = predicted["iteration_s"]
        steps = min(MOST_STEPS, max(STEPS, math.ceil(LEAST_S / per_step)))
        run = bench.skyctl("launch", plan, "--steps", steps, "--checkpoint-every", 0, "-y")
        seconds = [step["iteration_s"] for step in run["steps"][1:]]
        took_s = (fmean if about.by_mean or form == "stale" else median)(seconds)
        found[form] = predicted, took_s
        yield _line(name, form, per_step, took_s, predicted["interval"])
    exact = {form: one for form, one in found.items() if form in ("pipeline", "data", "hybrid")}
    if len(exact) > 1:
        chosen = _by_trial(exact)
        fastest_s = min(took_s for _, took_s in exact.values())
        yield {
            "lab": name,
            "probe_s": round(probe_s, 1),
            "by_prediction": min(exact, key=lambda form: exact[form][0]["iteration_s"]),
            "by_trial": chosen,
            "of_fastest": round(exact[chosen][1] / fastest_s, 4),
        }


def _by_trial(found: dict[str, tuple[dict[str, Any], float]]) -> str:
    """The form with the shortest measured step of those whose intervals reach into the fastest one's."""
    first = min(found, key=lambda form: found[form][0]["iteration_s"])
    high_s = found[first][0]["interval"]["high_s"]
    near = [form for form, (predicted, _) in found.items() if predicted["interval"]["low_s"] <= high_s]
    return min(near, key=lambda form: found[form][1])


def _line(
    name: str, form: str, predicted_s: float, measured_s: float, interval: dict[str, float] | None
) -> dict[str, Any]:
    line: dict[str, Any] = {
        "lab": name,
        "form": form,
        "predicted_s": round(predicted_s, 5),
        "measured_s": round(measured_s, 5),
        "error": round(predicted_s / measured_s - 1, 4),
    }
    if interval is not None:
        line |= {
            "low_s": round(interval["low_s"], 5),
            "high_s": round(interval["high_s"], 5),
            "held": interval["low_s"] <= measured_s <= interval["high_s"],
        }
    return line
