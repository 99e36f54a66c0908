"""Problems of data parallelism for the planner's tests, and brute force over sets, layouts and shares.

The brute force is written from the contract's words and shares nothing with the planner: it plays the layers'
sums one after the other, walks the routes message by message, and tries every share.
"""

from __future__ import annotations

import itertools
import random

from skyctl.records.problem import Device, Layer, LayerTimes, Link, Problem, SharedResource
from skyctl.records.rhythm import Rhythm

EDGE_BYTES = 2 << 20


def data_problem(
    speeds=(1.0, 1.0),
    *,
    rate=None,
    microbatches=8,
    layers=2,
    gradient=100.0,
    latency=0.0,
    memory=None,
    **more,
):
    """Layers of 1 s forward and 2 s backward on a device of speed 1, links of ``rate`` bytes a second."""
    ids = [f"n{i}/cpu:0" for i in range(len(speeds))]
    pairs = [(a, b) for a in ids for b in ids if a != b] if rate is not None else []
    memory = memory or [None] * len(ids)
    return Problem(
        layers=[
            Layer(
                name=f"layer{i}", flops=3.0, state_bytes=4 * gradient, activation_bytes=0.0, output_bytes=0.0,
                gradient_bytes=gradient,
            )
            for i in range(layers)
        ],
        devices=[
            Device(id=name, flops_per_s=speed, memory_bytes=room)
            for name, speed, room in zip(ids, speeds, memory, strict=True)
        ],
        links=[Link(source=a, target=b, latency_s=latency, bandwidth_bytes_per_s=rate) for a, b in pairs],
        microbatches=microbatches,
        **{"parallel": "data", **more},
    )  # fmt: skip


def random_data_problem(seed):
    """2 to 5 devices, 1 to 5 layers, up to 9 microbatches: limits of memory, pins, links that differ by
    direction or are missing, shared resources, processor times and bfloat16 on some."""
    r = random.Random(seed)
    n, count = r.randint(2, 5), r.randint(1, 5)
    big = r.choice([1.0, 1e7])  # where memory is limited, layers are large beside chunks
    layers = [
        Layer(
            name=f"layer{i}", flops=r.uniform(0.5, 2), state_bytes=big * r.uniform(1, 10),
            activation_bytes=big * r.uniform(0.1, 4), output_bytes=big * r.uniform(0.1, 2),
            workspace_bytes=r.choice([0.0, big * r.uniform(0, 3)]),
            gradient_bytes=r.choice([None, 0.0, big * r.uniform(0.2, 3), big * r.uniform(0.2, 3)]),
        )
        for i in range(count)
    ]  # fmt: skip
    total = sum(x.state_bytes + x.activation_bytes for x in layers)
    limited = r.random() < 0.5
    devices = [
        Device(
            id=f"n{i}/cpu:0",
            flops_per_s=r.choice([1.0, 2.0, r.uniform(0.3, 4)]),
            memory_bytes=total * r.uniform(0.6, 1.5) + 1e6 if limited and r.random() < 0.7 else None,
            reserved_bytes=r.choice([0.0, big * r.uniform(0, 1)]),
            handling_s=r.choice([0.0, r.uniform(0, 0.2)]),
            action_s=r.choice([0.0, r.uniform(0, 0.2)]),
            neighbour_s=r.uniform(0, 1),
            reduce_byte_s=r.choice([0.0, r.uniform(0, 1) / big]),
            message_byte_s=r.choice([0.0, r.uniform(0, 0.5) / big]),
        )
        for i in range(n)
    ]
    ids = [d.id for d in devices]
    times = {}
    for d in devices:
        if r.random() < 0.5:
            times[d.id] = LayerTimes(
                forward_s=[r.uniform(0.05, 1) for _ in layers],
                backward_s=[r.uniform(0.1, 2) for _ in layers],
                optimizer_s=[r.uniform(0, 0.3) for _ in layers],
            )
    pairs = [(a, b) for a in ids for b in ids if a != b]
    dense = r.choice([0.0, 0.8, 1.0, 1.0])
    links = [
        Link(
            source=a, target=b, latency_s=r.choice([0.0, r.uniform(0, 0.5)]),
            bandwidth_bytes_per_s=big * r.choice([r.uniform(0.5, 4), r.uniform(4, 100)]),
        )
        for a, b in pairs
        if r.random() < dense
    ]  # fmt: skip
    shared = [
        SharedResource(
            name=f"line{i}",
            bandwidth_bytes_per_s=big * r.uniform(1, 30),
            links=r.sample(pairs, r.randint(1, min(5, len(pairs)))),
        )
        for i in range(r.choice([0, 0, 1, 2]))
    ]
    return Problem(
        layers=layers,
        devices=devices,
        times=times,
        links=links,
        shared=shared,
        first_stage=r.sample(ids, r.randint(1, n)) if r.random() < 0.15 else None,
        last_stage=r.sample(ids, r.randint(1, n)) if r.random() < 0.15 else None,
        microbatches=r.randint(1, 9),
        receive_window=r.choice([0, 2]),
        schedule=r.choice(["1f1b", "sequential"]),
        recompute=r.random() < 0.5,
        parallel="data",
        sync_format=r.choice(["float32", "fixed32", "bfloat16", "int8"]),
    )


def delayed(problem):
    """The same with sums that are applied a step later; ``fixed32`` becomes ``float32``."""
    plain = "float32" if problem.sync_format == "fixed32" else problem.sync_format
    return problem.model_copy(update={"rhythm": Rhythm(delay=1), "sync_format": plain})


def harsh_data_problem(seed):
    """As ``random_data_problem``, with what may trip a search: layers and devices that cost nothing, equal
    devices, no room, links that are missing one way or differ by 10¹², resources that list a link twice."""
    r = random.Random(seed)
    problem = random_data_problem(seed)
    ids = [d.id for d in problem.devices]
    free = r.random() < 0.1
    layers = [
        x.model_copy(
            update={
                **({"flops": 0.0} if free or r.random() < 0.2 else {}),
                **({"gradient_bytes": 0.0} if r.random() < 0.2 else {}),
                **({"state_bytes": 1e200} if r.random() < 0.03 else {}),
            }
        )
        for x in problem.layers
    ]
    devices = [
        d.model_copy(
            update={
                **({"handling_s": 0.0, "action_s": 0.0} if free or r.random() < 0.2 else {}),
                **({"memory_bytes": 0.0} if r.random() < 0.1 else {}),
                **({"reduce_byte_s": r.choice([1e3, 1e-12])} if r.random() < 0.1 else {}),
            }
        )
        for d in problem.devices
    ]
    if r.random() < 0.3:
        devices = [devices[0].model_copy(update={"id": name}) for name in ids]
    zeros = [0.0] * len(layers)
    times = {
        name: LayerTimes(
            forward_s=zeros if r.random() < 0.3 else layer_times.forward_s,
            backward_s=zeros if r.random() < 0.3 else layer_times.backward_s,
            optimizer_s=zeros if free else layer_times.optimizer_s,
        )
        for name, layer_times in problem.times.items()
    }
    big = 1e7 if max(x.state_bytes for x in problem.layers) > 1e6 else 1.0
    pairs = [(a, b) for a in ids for b in ids if a != b]
    links = [
        Link(
            source=a, target=b, latency_s=r.choice([0.0, 1e-9, 0.1]),
            bandwidth_bytes_per_s=big * r.choice([10, 10, 20, 1e-2, 1e10]),
        )
        for a, b in pairs
        if r.random() < 0.8
    ]  # fmt: skip
    used = [[*chosen, chosen[0]] for chosen in (r.sample(pairs, r.randint(1, len(pairs))) for _ in range(2))]
    shared = [
        SharedResource(name=f"line{i}", bandwidth_bytes_per_s=big * r.choice([1, 50]), links=used[i])
        for i in range(r.choice([0, 1, 2]))
    ]
    more = {"layers": layers, "devices": devices, "times": times, "links": links, "shared": shared}
    return Problem.model_validate(
        {**dict(problem), **more, "microbatches": r.choice([1, 2, 5, 12])}
    )  # fmt: skip


def compressed(problem, seed):
    """The problem with random matrices of gradients, summed as ``powersgd:2`` over lines as fast for them."""
    r = random.Random(seed)
    matrices = [
        [(r.randint(1, 40), r.randint(1, 40)) for _ in range(r.randint(0, 3))] for _ in problem.layers
    ]
    sizes = [4.0 * sum(n * m for n, m in shapes) + r.choice([0.0, 300.0]) for shapes in matrices]
    layers = [
        layer.model_copy(update={"gradient_matrices": tuple(shapes), "gradient_bytes": size})
        for layer, shapes, size in zip(problem.layers, matrices, sizes, strict=True)
    ]
    faster = 500 / (1e7 if max(x.state_bytes for x in problem.layers) > 1e6 else 1.0)
    devices = [
        x.model_copy(
            update={
                "reduce_byte_s": x.reduce_byte_s / faster / 10,
                "message_byte_s": x.message_byte_s / faster / 10,
            }
        )
        for x in problem.devices
    ]
    lines = {
        name: [
            x.model_copy(update={"bandwidth_bytes_per_s": x.bandwidth_bytes_per_s * faster})
            for x in getattr(problem, name)
        ]
        for name in ("links", "shared")
    }
    more = {"layers": layers, "devices": devices, **lines, "sync_format": "powersgd:2"}
    return Problem.model_validate({**dict(problem), **more, "sync_uncompressed_steps": r.choice([0, 10])})


def passes_of(problem):
    """By layer (bytes of both passes, bytes compressed, bytes kept), by the definition of PowerSGD."""
    passes = []
    for layer in problem.layers:
        first, second, whole, kept = layer.gradient_bytes, 0, 0, 0
        for n, m in layer.gradient_matrices:
            if 2 * (n + m) < n * m:
                first += 8 * n - 4 * n * m
                second += 8 * m
                whole += 4 * n * m
                kept += 4 * n * m + 8 * n + 16 * m
        passes.append((first, second, whole, kept))
    return passes


def brute_force(problem):
    """The least step over every set of devices, every ring and star (or what ``sync`` asks for), and share.

    None when nothing fits.
    """
    best = None
    for size in range(1, min(len(problem.devices), problem.microbatches) + 1):
        for chosen in itertools.combinations(problem.devices, size):
            if any(
                names is not None and d.id not in names
                for d in chosen
                for names in (problem.first_stage, problem.last_stage)
            ):
                continue  # fmt: skip
            for routes in layouts(chosen, problem.sync):
                for shares in all_shares(problem.microbatches, size):
                    value = step_of(problem, chosen, shares, routes)
                    if value is not None and (best is None or value < best):
                        best = value
    return best


def all_shares(total, count):
    if count == 1:
        yield (total,)
        return
    for first in range(1, total - count + 2):
        for rest in all_shares(total - first, count - 1):
            yield (first, *rest)


def layouts(chosen, sync):
    """By layout, the routes: (share, messages to the root in order, messages from it in order)."""
    if len(chosen) == 1:
        return [[]]
    ids = [d.id for d in chosen]
    n = len(ids)
    rings = []
    for order in ([ids[0], *rest] for rest in itertools.permutations(ids[1:])):
        ring = []
        for root in range(n):
            seen = [order[(root + 1 + j) % n] for j in range(n)]  # ends with the root
            down = [order[(root + j) % n] for j in range(n)]  # begins with it
            ring.append((1 / n, [*itertools.pairwise(seen)], [*itertools.pairwise(down)]))
        rings.append(ring)
    stars = [
        [(1.0, [(x, root) for x in ids if x != root], [(root, x) for x in ids if x != root])] for root in ids
    ]
    return {"ring": rings, "star": stars}.get(sync, [*rings, *stars])


def step_of(problem, chosen, shares, routes):
    """Seconds of a step, or None where a device has no memory for it."""
    links = {(x.source, x.target): x for x in problem.links}
    sizes = [x.state_bytes / 4 if x.gradient_bytes is None else x.gradient_bytes for x in problem.layers]
    passes_count, whole = 1, 0.0
    predicted = 3 * sum(sizes) if problem.rhythm.delay else 0.0
    if problem.sync_format == "powersgd:2":
        both = passes_of(problem)
        sizes = [first for first, *_ in both]
        sizes[0] += sum(second for _, second, *_ in both)
        whole = sum(layer_passes[2] for layer_passes in both)
        passes_count = 2 if whole else 1
    sizes = [x * {"bfloat16": 1 / 2, "int8": 33 / 128}.get(problem.sync_format, 1) for x in sizes]
    sent = {}
    for share, up, down in routes:
        for message in up + down:
            sent[message] = sent.get(message, 0) + share
    slowest = max(
        [used / links[pair].bandwidth_bytes_per_s for pair, used in sent.items() if pair in links]
        + [
            sum(used for pair, used in sent.items() if pair in set(x.links)) / x.bandwidth_bytes_per_s
            for x in problem.shared
        ],
        default=0.0,
    )
    ends, passes, processors, optimizers = [], [], [], []
    for d, m in zip(chosen, shares, strict=True):
        children = sum(target == d.id for _, up, _ in routes for _, target in up)
        ways = [False, True] if problem.recompute else [False]
        fitting = [way for way in ways if d.memory_bytes is None
                   or need_of(problem, d, way) + EDGE_BYTES * children <= d.memory_bytes]  # fmt: skip
        if not fitting:
            return None
        layer_times = problem.times.get(d.id)
        forward = (
            layer_times.forward_s if layer_times else [x.flops / d.flops_per_s / 3 for x in problem.layers]
        )
        backward = (
            layer_times.backward_s
            if layer_times
            else [x.flops / d.flops_per_s * 2 / 3 for x in problem.layers]
        )
        if fitting[0]:
            backward = [f + b for f, b in zip(forward, backward, strict=True)]
        ends.append(m * (sum(forward) + sum(backward) + d.handling_s + d.action_s))
        passes.append([ends[-1] - sum(backward[:k]) for k in range(len(sizes))])
        added = sum(share for share, up, _ in routes for _, target in up if target == d.id)
        passed = sum(share for share, up, down in routes for message in up + down if d.id in message)
        passed *= 2 if problem.rhythm.delay and slowest >= 4e-8 else 1  # in short messages
        processors.append(ends[-1] + sum(sizes) * (d.reduce_byte_s * added + d.message_byte_s * passed))
        added_s = (9 * whole + predicted) * d.reduce_byte_s
        optimizers.append(sum(layer_times.optimizer_s) + added_s if layer_times else 0.0)
    if len(chosen) == 1:
        return ends[0] + optimizers[0]
    if problem.rhythm.delay:
        ready = max(p + o for p, o in zip(processors, optimizers, strict=True))
        latency = max(
            depth(links, up[::-1], share_root(up, down), 0) + depth(links, down, share_root(up, down), 1)
            for _, up, down in routes
        )
        return max(ready, sum(sizes) * slowest + latency)
    done = 0.0
    for k in reversed(range(len(sizes))):
        done = max(done, *(at[k] for at in passes)) + sizes[k] * slowest
    latency = max(
        depth(links, up[::-1], share_root(up, down), 0) + depth(links, down, share_root(up, down), 1)
        for _, up, down in routes
    )
    return max(done, *processors) + passes_count * latency + max(optimizers)


def share_root(up, down):
    """A route's root sends down and is never sent to there."""
    return next(a for a, _ in down if all(a != b for _, b in down))


def depth(links, messages, root, child):
    """Latency of the longest way; messages in order from the root on."""
    far = {root: 0.0}
    for message in messages:
        link = links.get(message)
        far[message[child]] = far[message[1 - child]] + (link.latency_s if link else 0.0)
    return max(far.values())


def need_of(problem, device, recompute):
    layers = problem.layers
    need = device.reserved_bytes + sum(x.state_bytes for x in layers)
    # gradients and weights of the step before, or gradients as integers
    sets = 2 if problem.rhythm.delay else int(problem.sync_format == "fixed32")
    need += sets * sum(x.state_bytes / 4 if x.gradient_bytes is None else x.gradient_bytes for x in layers)
    if problem.sync_format == "powersgd:2":
        need += sum(layer_passes[3] for layer_passes in passes_of(problem))
    if not recompute:
        return need + sum(x.activation_bytes for x in layers) + max(x.workspace_bytes for x in layers)
    inputs = [layers[0].activation_bytes]
    inputs += [min(x.activation_bytes, before.output_bytes) for before, x in itertools.pairwise(layers)]
    return need + sum(inputs) + max(x.activation_bytes + x.workspace_bytes for x in layers)
