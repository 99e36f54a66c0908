"""The problems that are measured. Every random number comes from a seed that stands here."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from skyctl.records.problem import Device, Layer, Link, Problem

Numbers = Sequence[float] | npt.NDArray[Any]

FAST = 1e13
"""Flops a second of a device of factor 1; only ratios matter."""


class Suite(NamedTuple):
    """Random problems of one size; number i has the seed ``seed + i``. ``head``: the last layer's cost."""

    devices: int
    layers: int
    head: tuple[float, float]
    seed: int

    def name(self) -> str:
        """As in the tables."""
        return f"{self.devices} × {self.layers}, head {self.head[0]:g}–{self.head[1]:g}"


HEAVY = (5.0, 10.0)
QUALITY = (
    Suite(4, 24, HEAVY, 4_000),
    Suite(8, 48, HEAVY, 8_000),
    Suite(16, 96, HEAVY, 16_000),
    Suite(8, 48, (2.0, 4.0), 8_000),
)


def paper_layers(encoders: int, h: int = 1024, batch: int = 32, tokens: int = 128) -> tuple[Layer, ...]:
    """The paper's BERT: an embedding, three sublayers an encoder, a pooler, a classifier of 3 classes.

    Backward takes twice the forward; 16 bytes of state a parameter (float32 weights, gradients, Adam).
    """
    a = batch * (8 * tokens * h**2 + 4 * tokens**2 * h)
    b = batch * 2 * tokens * h * 4 * h
    names = ["embedding"]
    names += [f"encoder.{i}.{part}" for i in range(encoders) for part in ("attention", "body", "tail")]
    names += ["pooler", "classifier"]
    forward = [batch * tokens * h * 10, *[a, b, b] * encoders, batch * 2 * h**2, batch * 6 * h]
    parameters = [30522 * h, *[4 * h * h] * (3 * encoders), h * h, 3 * h]
    return tuple(
        Layer(
            name=name,
            flops=3.0 * flops,
            state_bytes=16.0 * count,
            activation_bytes=0.0,
            output_bytes=4.0 * batch * tokens * h,
        )
        for name, flops, count in zip(names, forward, parameters, strict=True)
    )


def devices(factors: Numbers, memory: Numbers | None = None) -> list[Device]:
    """Device d takes ``factors[d]`` times as long as one of ``FAST``."""
    return [
        Device(
            id=f"n{d}/cuda:0",
            flops_per_s=FAST / float(factor),
            memory_bytes=None if memory is None else float(memory[d]),
        )
        for d, factor in enumerate(factors)
    ]


def _bottleneck(layers: Sequence[Layer], nodes: Sequence[Device]) -> Problem:
    return Problem(
        layers=tuple(layers),
        devices=tuple(nodes),
        microbatches=64,
        schedule="1f1b",
        objective="bottleneck",
    )


def paper_case(name: str) -> Problem:
    """160 encoders on 64 devices: ``f1`` factors in [1, 2), ``f2`` whole ones 2–7; with c, caps that bind.

    ``63``: f2 without its first device, as in the paper's runs, whose first node was the coordinator.
    """
    factors: dict[str, npt.NDArray[Any]] = {
        "f1": 1 + np.random.default_rng(32).random(64),
        "f2": 1 + np.random.default_rng(35).integers(1, 7, 64),
        "63": 1 + np.random.default_rng(35).integers(1, 7, 64)[1:],
    }
    caps = 1.25e9 / (1 + 2 * np.random.default_rng(22).random(64)) if name.endswith("c") else None
    return _bottleneck(paper_layers(160), devices(factors[name.rstrip("c")], caps))


def published_case(count: int, encoders: int) -> Problem:
    """The paper's slowdowns (whole ones, 2–7) on ``count`` devices: small enough for the published MILP."""
    factors = 1 + np.random.default_rng(35).integers(1, 7, count)
    return _bottleneck(paper_layers(encoders), devices(factors))


def large_case(count: int, encoders: int, seed: int) -> Problem:
    """``count`` devices, all different: factors uniform in [1, 4)."""
    return _bottleneck(paper_layers(encoders), devices(np.random.default_rng(seed).uniform(1, 4, count)))


def random_costs_case(seed: int) -> Problem:
    """64 different devices (factors uniform in [1, 4)) × 483 layers of costs uniform in [1, 9)."""
    rng = np.random.default_rng(seed)
    flops = rng.uniform(1, 9, 483) * 1e11
    return _bottleneck(plain_layers(flops.tolist()), devices(rng.uniform(1, 4, 64)))


def plain_layers(flops: Sequence[float], output_bytes: float = 0.0) -> tuple[Layer, ...]:
    """Layers of those flops, a byte of state each: memory in proportion to their number."""
    return tuple(
        Layer(name=f"layer{i}", flops=x, state_bytes=1.0, activation_bytes=0.0, output_bytes=output_bytes)
        for i, x in enumerate(flops)
    )


def quality_case(suite: Suite, i: int, objective: str, *, linked: bool = False) -> Problem:
    """Number i: speeds log-uniform 1–8, costs uniform 1–2, the last layer (a head) heavier.

    Memory is log-uniform too, drawn apart from speed, and large enough never to bind. ``linked``: a
    message occupies a link for 0.02–0.5 of the mean stage's time (log-uniform), latency up to a tenth of it.
    """
    r = random.Random(suite.seed + i)
    flops = [r.uniform(1, 2) * 1e11 for _ in range(suite.layers - 1)] + [r.uniform(*suite.head) * 1e11]
    factors = [8 ** r.random() for _ in range(suite.devices)]
    memory = [suite.layers * 8 ** r.random() for _ in range(suite.devices)]
    nodes = devices(factors, memory)
    links: tuple[Link, ...] = ()
    if linked:
        stage = sum(flops) / sum(d.flops_per_s for d in nodes)
        links = tuple(
            Link(
                source=a.id,
                target=b.id,
                latency_s=r.uniform(0, 0.1) * stage,
                bandwidth_bytes_per_s=1e6 / (stage * math.exp(r.uniform(math.log(0.02), math.log(0.5)))),
            )
            for a in nodes
            for b in nodes
            if a is not b
        )
    return Problem(
        layers=plain_layers(flops, 1e6),
        devices=tuple(nodes),
        links=links,
        microbatches=16,
        schedule="1f1b",
        objective=objective,  # type: ignore[arg-type]
    )


def sites_case(seed: int, mean_stage_s: float) -> Problem:
    """24 devices in three sites, factors uniform in [1, 4), 40 encoders (123 layers), 64 microbatches, 1F1B.

    Within a site 1 Gbit/s and 0.2 ms; between sites 50 Mbit/s and 20 ms, and a message over one such boundary
    takes half the mean stage's time, which is ``mean_stage_s`` where all devices share the work ideally.
    """
    rng = np.random.default_rng(seed)
    speed = 1 / rng.uniform(1, 4, 24)
    base = paper_layers(40)
    unit = sum(layer.flops for layer in base) / float(speed.sum()) / mean_stage_s
    wan = 50e6 / 8
    layers = tuple(x.model_copy(update={"output_bytes": 0.5 * mean_stage_s * wan}) for x in base)
    nodes = [
        Device(id=f"s{d // 8}n{d % 8}/cuda:0", flops_per_s=float(speed[d]) * unit, memory_bytes=None)
        for d in range(24)
    ]
    links = tuple(
        Link(
            source=a.id,
            target=b.id,
            latency_s=2e-4 if a.id[:2] == b.id[:2] else 0.02,
            bandwidth_bytes_per_s=1e9 / 8 if a.id[:2] == b.id[:2] else wan,
        )
        for a in nodes
        for b in nodes
        if a is not b
    )
    return Problem(
        layers=layers,
        devices=tuple(nodes),
        links=links,
        microbatches=64,
        schedule="1f1b",
        objective="iteration",
    )


def crossings(used: Sequence[str]) -> int:
    """How often a pipeline over ``sites_case``'s devices, in this order, goes from one site to another."""
    return sum(a[:2] != b[:2] for a, b in pairwise(used))
