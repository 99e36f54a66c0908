"""Planning problems as JSON: the same ones as the planner's random suite and its benchmark's tables.

They are made anew here, in plain dicts, so that they stay what they are whatever is renamed elsewhere.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

Problem = dict[str, Any]
SUITE_SEED = 20_000
FAST = 1e13


def _layer(name: str, flops: float, state: float, activation: float, output: float, work: float) -> Problem:
    return {
        "name": name,
        "flops": flops,
        "state_bytes": state,
        "activation_bytes": activation,
        "output_bytes": output,
        "workspace_bytes": work,
    }


def suite_problem(i: int) -> Problem:
    """Number i of the random suite: up to 5 devices and 8 layers."""
    fixed = {
        "objective": ("bottleneck", "iteration")[i % 2],
        "schedule": ("sequential", "gpipe", "1f1b")[i // 2 % 3],
    }
    return random_problem(SUITE_SEED + i, 5, 8, 0.5, **fixed)


def random_problem(seed: int, most_devices: int, most_layers: int, linked: float, **fixed: Any) -> Problem:
    """Random caps, measured times, pins, links, shared resources, windows; the order of draws matters."""
    r = random.Random(seed)
    n, count = r.randint(2, most_devices), r.randint(3, most_layers)
    layers = [
        _layer(
            f"layer{i}",
            r.uniform(0.2, 2),
            r.uniform(1, 10),
            r.uniform(0.1, 2),
            r.uniform(0.1, 2),
            r.choice([0.0, r.uniform(0, 5)]),
        )
        for i in range(count)
    ]
    total = sum(x["state_bytes"] for x in layers)
    devices = [
        {
            "id": f"n{i}/cpu:0",
            "flops_per_s": r.choice([1.0, 2.0, r.uniform(0.5, 4)]),
            "memory_bytes": total * r.uniform(0.4, 2) if r.random() < 0.6 else None,
            "reserved_bytes": r.choice([0.0, r.uniform(0, 2)]),
        }
        for i in range(n)
    ]
    ids = [d["id"] for d in devices]
    times = {d["id"]: _times(r, layers, d["flops_per_s"]) for d in devices if r.random() < 0.4}
    pairs = [(a, b) for a in ids for b in ids if a != b]
    links = []
    if r.random() < linked:
        links = [
            {
                "source": a,
                "target": b,
                "latency_s": r.choice([0.0, r.uniform(0, 0.5)]),
                "bandwidth_bytes_per_s": r.uniform(0.5, 10),
            }
            for a, b in pairs
            if r.random() < 0.8
        ]
    shared = []
    if r.random() < 0.3:
        some = [list(pair) for pair in r.sample(pairs, r.randint(1, min(4, len(pairs))))]
        shared = [{"name": "up", "bandwidth_bytes_per_s": r.uniform(1, 8), "links": some}]
    made = {
        "kind": "skyctl/problem",
        "version": 1,
        "layers": layers,
        "devices": devices,
        "times": times,
        "links": links,
        "shared": shared,
        "first_stage": r.sample(ids, r.randint(1, n)) if r.random() < 0.3 else None,
        "last_stage": r.sample(ids, r.randint(1, n)) if r.random() < 0.3 else None,
        "microbatches": r.randint(1, 6),
        "receive_window": r.choice([0, 0, 1, 2]),
        "schedule": r.choice(["sequential", "gpipe", "1f1b"]),
        "objective": r.choice(["iteration", "bottleneck"]),
    }
    return {**made, **fixed}


def _times(r: random.Random, layers: Sequence[Problem], speed: float) -> Problem:
    base = [x["flops"] / speed for x in layers]
    return {
        "forward_s": [x * r.uniform(0.3, 0.5) for x in base],
        "backward_s": [x * r.uniform(0.5, 1) for x in base],
        "optimizer_s": [r.uniform(0, 0.3) for _ in base],
    }


def _problem(layers: list[Problem], nodes: list[Problem], **more: Any) -> Problem:
    fixed = {"microbatches": 64, "schedule": "1f1b", "objective": "bottleneck"}
    return {"kind": "skyctl/problem", "version": 1, "layers": layers, "devices": nodes, **fixed, **more}


def _nodes(factors: Sequence[float], memory: Sequence[float] | None = None) -> list[Problem]:
    return [
        {
            "id": f"n{d}/cuda:0",
            "flops_per_s": FAST / float(f),
            "memory_bytes": None if memory is None else float(memory[d]),
        }
        for d, f in enumerate(factors)
    ]


def paper_layers(encoders: int, h: int = 1024, batch: int = 32, tokens: int = 128) -> list[Problem]:
    """The paper's BERT: an embedding, three sublayers an encoder, a pooler, a classifier of 3 classes."""
    a = batch * (8 * tokens * h**2 + 4 * tokens**2 * h)
    b = batch * 2 * tokens * h * 4 * h
    names = ["embedding"]
    names += [f"encoder.{i}.{part}" for i in range(encoders) for part in ("attention", "body", "tail")]
    names += ["pooler", "classifier"]
    forward = [batch * tokens * h * 10, *[a, b, b] * encoders, batch * 2 * h**2, batch * 6 * h]
    parameters = [30522 * h, *[4 * h * h] * (3 * encoders), h * h, 3 * h]
    return [
        _layer(name, 3.0 * flops, 16.0 * count, 0.0, 4.0 * batch * tokens * h, 0.0)
        for name, flops, count in zip(names, forward, parameters, strict=True)
    ]


def paper_case(name: str) -> Problem:
    """160 encoders on 64 devices; ``c``: with caps that bind."""
    from numpy.random import default_rng

    factors = {
        "f1": 1 + default_rng(32).random(64),
        "f2": 1 + default_rng(35).integers(1, 7, 64),
        "63": 1 + default_rng(35).integers(1, 7, 64)[1:],
    }
    caps = 1.25e9 / (1 + 2 * default_rng(22).random(64)) if name.endswith("c") else None
    return _problem(paper_layers(160), _nodes(factors[name.rstrip("c")], caps))


def published_case(count: int, encoders: int) -> Problem:
    from numpy.random import default_rng

    return _problem(paper_layers(encoders), _nodes(1 + default_rng(35).integers(1, 7, count)))


def large_case(count: int, encoders: int, seed: int) -> Problem:
    from numpy.random import default_rng

    return _problem(paper_layers(encoders), _nodes(default_rng(seed).uniform(1, 4, count)))


def random_costs_case(seed: int) -> Problem:
    from numpy.random import default_rng

    rng = default_rng(seed)
    flops = rng.uniform(1, 9, 483) * 1e11
    return _problem(_plain(flops.tolist(), 0.0), _nodes(rng.uniform(1, 4, 64)))


def _plain(flops: Sequence[float], output: float) -> list[Problem]:
    return [_layer(f"layer{i}", x, 1.0, 0.0, output, 0.0) for i, x in enumerate(flops)]


HEAVY = (5.0, 10.0)
QUALITY = ((4, 24, HEAVY, 4_000), (8, 48, HEAVY, 8_000), (16, 96, HEAVY, 16_000), (8, 48, (2.0, 4.0), 8_000))


def quality_case(suite: int, i: int, objective: str, *, linked: bool = False) -> Problem:
    """Number i of one of ``QUALITY``."""
    count, layers, head, seed = QUALITY[suite]
    r = random.Random(seed + i)
    flops = [r.uniform(1, 2) * 1e11 for _ in range(layers - 1)] + [r.uniform(*head) * 1e11]
    factors = [8 ** r.random() for _ in range(count)]
    memory = [layers * 8 ** r.random() for _ in range(count)]
    nodes = _nodes(factors, memory)
    links = []
    if linked:
        stage = sum(flops) / sum(d["flops_per_s"] for d in nodes)
        links = [
            {
                "source": a["id"],
                "target": b["id"],
                "latency_s": r.uniform(0, 0.1) * stage,
                "bandwidth_bytes_per_s": 1e6 / (stage * math.exp(r.uniform(math.log(0.02), math.log(0.5)))),
            }
            for a in nodes
            for b in nodes
            if a is not b
        ]
    return _problem(_plain(flops, 1e6), nodes, links=links, microbatches=16, objective=objective)


def sites_case(seed: int, mean_stage_s: float) -> Problem:
    """24 devices in three sites, 40 encoders, 64 microbatches."""
    from numpy.random import default_rng

    speed = 1 / default_rng(seed).uniform(1, 4, 24)
    base = paper_layers(40)
    unit = sum(x["flops"] for x in base) / float(speed.sum()) / mean_stage_s
    wan = 50e6 / 8
    layers = [{**x, "output_bytes": 0.5 * mean_stage_s * wan} for x in base]
    nodes = [
        {"id": f"s{d // 8}n{d % 8}/cuda:0", "flops_per_s": float(speed[d]) * unit, "memory_bytes": None}
        for d in range(24)
    ]
    links = [
        {
            "source": a["id"],
            "target": b["id"],
            "latency_s": 2e-4 if a["id"][:2] == b["id"][:2] else 0.02,
            "bandwidth_bytes_per_s": 1e9 / 8 if a["id"][:2] == b["id"][:2] else wan,
        }
        for a in nodes
        for b in nodes
        if a is not b
    ]
    return _problem(layers, nodes, links=links, objective="iteration")


def table_instances() -> Iterator[tuple[str, Problem]]:
    """Those of the benchmark's tables that are planned in seconds."""
    for name in ("f1", "f1c", "f2", "f2c", "63"):
        yield f"paper {name}", paper_case(name)
    yield "large 256", large_case(256, 400, 256)
    for count, encoders in ((4, 10), (8, 10), (8, 20)):
        yield f"published {count} x {encoders}", published_case(count, encoders)
    for suite, indices in ((0, 20), (1, 10), (3, 10)):
        for i in range(indices):
            yield f"quality {suite} bottleneck {i}", quality_case(suite, i, "bottleneck")
    for linked in (False, True):
        for i in range(20):
            name = f"quality 0 iteration {'linked ' if linked else ''}{i}"
            yield name, quality_case(0, i, "iteration", linked=linked)


def bounded_instances() -> Iterator[tuple[str, Problem]]:
    """Those that are not proved in seconds: what time allows differs, so they are held to limits only."""
    yield "random costs", random_costs_case(483)
    yield "sites", sites_case(0, 1.0)
    yield "sites short", sites_case(0, 0.1)
    yield "quality 1 iteration 0", quality_case(1, 0, "iteration")
    yield "quality 1 iteration linked 0", quality_case(1, 0, "iteration", linked=True)
    yield "quality 2 bottleneck 0", quality_case(2, 0, "bottleneck")


def small(**more: Any) -> Problem:
    """Seven layers on three devices with caps, links and a shared uplink."""
    layers = [
        _layer("embedding", 1e9, 2e8, 1e7, 1e6, 1e6),
        *[_layer(f"block.{i // 2}.{p}", 6e9 + i * 1e9, 3e8, 1e7 + i * 1e6, 1e6 + i * 1e5, 0.0)
          for i, p in enumerate(("attention", "mlp") * 3)],
        _layer("head", 3e9, 2e8, 1e7, 1e6, 2e6),
    ]  # fmt: skip
    nodes = [
        {"id": "old/cpu:0", "flops_per_s": 3e10, "memory_bytes": 8e9},
        {"id": "new/cpu:0", "flops_per_s": 1e11, "memory_bytes": 1.5e9, "reserved_bytes": 1e8},
        {"id": "tiny/cpu:0", "flops_per_s": 2e10, "memory_bytes": 8e9},
    ]
    ids = [d["id"] for d in nodes]
    links = [
        {"source": a, "target": b, "latency_s": 0.001, "bandwidth_bytes_per_s": 1.2e7}
        for a in ids
        for b in ids
        if a != b
    ]
    shared = [{"name": "up", "bandwidth_bytes_per_s": 1e7, "links": [[ids[0], ids[1]], [ids[2], ids[1]]]}]
    made = _problem(layers, nodes, links=links, shared=shared, microbatches=8, objective="iteration")
    return {**made, **more}


def handled() -> Problem:
    """Version 2 and 5: deferred weight gradients, handling, recomputation, link dtypes."""
    problem = small(version=5, recompute=True)
    problem["layers"] = [{**x, "deferred_bytes": x["activation_bytes"] / 2} for x in problem["layers"]]
    problem["devices"] = [
        {**d, "handling_s": 0.002, "neighbour_s": 0.001, "action_s": 0.0005} for d in problem["devices"]
    ]
    problem["links"] = [{**x, "dtype": "bfloat16", "sent_share": 0.5} for x in problem["links"]]
    problem["times"] = {
        d["id"]: {
            "forward_s": [x["flops"] / d["flops_per_s"] / 3 for x in problem["layers"]],
            "backward_s": [x["flops"] / d["flops_per_s"] / 1.5 for x in problem["layers"]],
            "weight_s": [x["flops"] / d["flops_per_s"] / 3 for x in problem["layers"]],
            "optimizer_s": [0.001 for _ in problem["layers"]],
        }
        for d in problem["devices"][:2]
    }
    return problem
