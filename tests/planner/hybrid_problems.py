"""Problems of hybrids for the planner's tests, and brute force over all of them.

The brute force enumerates by itself: every device goes to a pipeline or to none, and every pipeline has every
order, cut and share. The planner's own evaluation tells what one candidate takes.
"""

from __future__ import annotations

import itertools
import random

from skyctl.planner.cost_model import StageAssignment
from skyctl.planner.hybrid.hybrid_model import Draft, HybridModel
from skyctl.records.problem import Device, Layer, LayerTimes, Link, Problem, SharedResource, Tie


def random_hybrid_problem(seed, *, devices=(2, 5), layers=(3, 6), microbatches=(2, 4)):
    """Limits of memory, pins, ties, links that differ or are missing, shared resources, processor times."""
    r = random.Random(seed)
    n, count = r.randint(*devices), r.randint(*layers)
    big = r.choice([1.0, 1e7])  # where memory is limited, layers are large beside the sums' buffers
    model_layers = [
        Layer(
            name=f"layer{i}", flops=r.uniform(0.5, 2), state_bytes=big * r.uniform(1, 10),
            activation_bytes=big * r.uniform(0.1, 2), output_bytes=big * r.uniform(0.1, 2),
            workspace_bytes=r.choice([0.0, big * r.uniform(0, 3)]),
            gradient_bytes=r.choice([None, big * r.uniform(0, 3)]),
        )
        for i in range(count)
    ]  # fmt: skip
    total = sum(layer.state_bytes for layer in model_layers)
    limited = big > 1 and r.random() < 0.7
    hard = r.random() < 0.5
    described = [
        Device(
            id=f"n{i}/cpu:0", flops_per_s=r.choice([1.0, 2.0, r.uniform(0.5, 4)]),
            memory_bytes=total * r.uniform(0.5, 2.5) if limited and r.random() < 0.7 else None,
            handling_s=r.choice([0.0, 0.1]) if hard else 0.0, neighbour_s=0.05 if hard else 0.0,
            action_s=0.02 if hard else 0.0,
            reduce_byte_s=r.choice([0.0, 0.1 / big]), message_byte_s=r.choice([0.0, 0.1 / big]),
        )
        for i in range(n)
    ]  # fmt: skip
    ids = [device.id for device in described]
    times = {}
    for device in described:
        if r.random() < 0.4:
            whole = [layer.flops / device.flops_per_s for layer in model_layers]
            times[device.id] = LayerTimes(
                forward_s=[x * r.uniform(0.3, 0.5) for x in whole],
                backward_s=[x * r.uniform(0.5, 1) for x in whole],
                optimizer_s=[r.uniform(0, 0.3) for _ in whole],
            )
    pairs = [(a, b) for a in ids for b in ids if a != b]
    linked = r.choice([0.9, 0.9, 0.6, 0.0])
    links = [
        Link(
            source=a, target=b, latency_s=r.choice([0.0, r.uniform(0, 0.3)]),
            bandwidth_bytes_per_s=big * r.choice([2.0, r.uniform(0.5, 20)]),
        )
        for a, b in pairs
        if r.random() < linked
    ]  # fmt: skip
    shared = []
    if r.random() < 0.3:
        some = r.sample(pairs, r.randint(1, min(4, len(pairs))))
        shared = [SharedResource(name="up", bandwidth_bytes_per_s=big * r.uniform(1, 8), links=some)]
    return Problem(
        layers=model_layers,
        devices=described,
        times=times,
        links=links,
        shared=shared,
        first_stage=r.sample(ids, r.randint(1, n)) if r.random() < 0.2 else None,
        last_stage=r.sample(ids, r.randint(1, n)) if r.random() < 0.2 else None,
        microbatches=r.randint(*microbatches),
        receive_window=r.choice([0, 0, 1]),
        schedule=r.choice(["1f1b", "1f1b", "sequential"]),
        sync=r.choice(["auto", "auto", "ring", "star"]),
        sync_format=r.choice(["float32", "float32", "bfloat16", "fixed32"]),
        ties=[Tie(layers=[0, count - 1], bytes=big)] if r.random() < 0.1 else [],
        parallel="hybrid",
    )


def brute_force(problem):
    """The shortest step of all hybrids, in seconds; None: none fits."""
    model = HybridModel(problem)
    n, layers, m = len(problem.devices), len(problem.layers), problem.microbatches
    best = None
    for colours in itertools.product(range(n + 1), repeat=n):
        names = sorted(set(colours) - {0})
        firsts = [colours.index(name) for name in names]
        if len(names) < 2 or names != list(range(1, len(names) + 1)) or firsts != sorted(firsts):
            continue  # the same sets under other names come once
        if len(names) > m:
            continue
        members = [[d for d in range(n) if colours[d] == name] for name in names]
        if any(len(part) > layers for part in members):
            continue
        for shares in itertools.product(range(1, m), repeat=len(names)):
            if sum(shares) != m:
                continue
            options = [
                [x for x in placements_of(part, layers) if model.play(x, share) is not None]
                for part, share in zip(members, shares, strict=True)
            ]
            for placements in itertools.product(*options):
                step = model.step(Draft(placements, shares))
                if step is not None and (best is None or step.iteration_s < best):
                    best = step.iteration_s
    return best


def placements_of(members, layers):
    for order in itertools.permutations(members):
        for stops in itertools.product(range(1, layers + 1), repeat=len(order)):
            if list(stops) == sorted(set(stops)) and stops[-1] == layers:
                starts = (0, *stops[:-1])
                yield tuple(StageAssignment(d, p, q) for d, p, q in zip(order, starts, stops, strict=True))
