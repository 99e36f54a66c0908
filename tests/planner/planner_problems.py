"""Problems for the planner's tests: random small ones, and brute force over every order and cut."""

from __future__ import annotations

import itertools
import random

from skyctl.records.problem import Device, Layer, LayerTimes, Link, Problem, SharedResource
from skyctl.schedule.actions import least_in_flight
from skyctl.schedule.simulation import simulate
from skyctl.schedule.step_times import BoundaryTimes, MessageTimes, StageTimes

SUITE_SEED = 20_000
"""The random suite's first seed (``suite_problem``, ``make bench-planner``)."""


def layer(i, flops=1.0, state=1.0, activation=0.0, output=0.0, workspace=0.0):
    return Layer(
        name=f"layer{i}", flops=flops, state_bytes=state, activation_bytes=activation, output_bytes=output,
        workspace_bytes=workspace,
    )  # fmt: skip


def problem(flops=(1.0,) * 6, speeds=(1.0, 1.0), memory=None, **more):
    """Layers of those flops on devices of those speeds; 3 flops a second are 1 s forward, 2 s backward."""
    memory = memory or [None] * len(speeds)
    more = {"microbatches": 4, "objective": "bottleneck", **more}
    return Problem(
        layers=tuple(layer(i, flops=float(f)) for i, f in enumerate(flops)),
        devices=tuple(
            Device(id=f"n{i}/cpu:0", flops_per_s=float(s), memory_bytes=m)
            for i, (s, m) in enumerate(zip(speeds, memory, strict=True))
        ),
        **more,
    )


def undecided():
    """20 different devices, memory that depends on the place: nothing seems to fit, and no bound shows it."""
    p = problem(
        flops=[1.0] * 41, speeds=[1.0] * 20, memory=[25 + i / 1000 for i in range(20)], microbatches=32
    )
    layers = (x.model_copy(update={"activation_bytes": 1.0 + (i % 7) / 5}) for i, x in enumerate(p.layers))
    return p.model_copy(update={"layers": tuple(layers)})


def suite_problem(i):
    """Number i of the random suite: 2–5 devices, 3–8 layers, objectives and static schedules in turn, links
    on half, shared uplinks on some of them, caps, pins, measured times and receive windows on some."""
    return random_problem(
        SUITE_SEED + i,
        most_devices=5,
        most_layers=8,
        linked=0.5,
        objective=("bottleneck", "iteration")[i % 2],
        schedule=("sequential", "gpipe", "1f1b")[i // 2 % 3],
    )


def random_problem(seed, *, most_devices=4, most_layers=7, linked=0.6, **fixed):
    """Random caps, measured times, pins, links, shared resources, windows.

    Args:
        most_devices: 2 to this many devices; 3 to ``most_layers`` layers.
        linked: how probable it is that there are links.
        fixed: fields of the problem that are not random.
    """
    r = random.Random(seed)
    n, count = r.randint(2, most_devices), r.randint(3, most_layers)
    layers = tuple(
        layer(
            i, r.uniform(0.2, 2), r.uniform(1, 10), r.uniform(0.1, 2), r.uniform(0.1, 2),
            r.choice([0.0, r.uniform(0, 5)]),
        )
        for i in range(count)
    )  # fmt: skip
    total = sum(x.state_bytes for x in layers)
    devices = tuple(
        Device(
            id=f"n{i}/cpu:0",
            flops_per_s=r.choice([1.0, 2.0, r.uniform(0.5, 4)]),
            memory_bytes=total * r.uniform(0.4, 2) if r.random() < 0.6 else None,
            reserved_bytes=r.choice([0.0, r.uniform(0, 2)]),
        )
        for i in range(n)
    )
    ids = [d.id for d in devices]
    times = {}
    for d in devices:
        if r.random() < 0.4:
            base = [x.flops / d.flops_per_s for x in layers]
            times[d.id] = LayerTimes(
                forward_s=tuple(x * r.uniform(0.3, 0.5) for x in base),
                backward_s=tuple(x * r.uniform(0.5, 1) for x in base),
                optimizer_s=tuple(r.uniform(0, 0.3) for _ in base),
            )
    pairs = [(a, b) for a in ids for b in ids if a != b]
    links = ()
    if r.random() < linked:
        links = tuple(
            Link(
                source=a, target=b, latency_s=r.choice([0.0, r.uniform(0, 0.5)]),
                bandwidth_bytes_per_s=r.uniform(0.5, 10),
            )
            for a, b in pairs
            if r.random() < 0.8
        )  # fmt: skip
    shared = ()
    if r.random() < 0.3:
        some = tuple(r.sample(pairs, r.randint(1, min(4, len(pairs)))))
        shared = (SharedResource(name="up", bandwidth_bytes_per_s=r.uniform(1, 8), links=some),)
    return Problem(
        **{
            "layers": layers,
            "devices": devices,
            "times": times,
            "links": links,
            "shared": shared,
            "first_stage": tuple(r.sample(ids, r.randint(1, n))) if r.random() < 0.3 else None,
            "last_stage": tuple(r.sample(ids, r.randint(1, n))) if r.random() < 0.3 else None,
            "microbatches": r.randint(1, 6),
            "receive_window": r.choice([0, 0, 1, 2]),
            "schedule": r.choice(["sequential", "gpipe", "1f1b"]),
            "objective": r.choice(["iteration", "bottleneck"]),
            **fixed,
        }
    )


def brute_force(problem):
    """The best value over every subset, order and cut, from the contract's words; None when nothing fits."""
    count = len(problem.layers)
    best = None
    for stages in range(1, min(len(problem.devices), count) + 1):
        for order in itertools.permutations(problem.devices, stages):
            if problem.first_stage is not None and order[0].id not in problem.first_stage:
                continue
            if problem.last_stage is not None and order[-1].id not in problem.last_stage:
                continue
            for cuts in itertools.combinations(range(1, count), stages - 1):
                value = value_of(problem, order, (0, *cuts, count))
                if value is not None and (best is None or value < best):
                    best = value
    return best


def value_of(problem, order, cuts):
    stages = len(order)
    links = {(x.source, x.target): x for x in problem.links}
    m = problem.microbatches
    entries = []
    for s, device in enumerate(order):
        part = problem.layers[cuts[s] : cuts[s + 1]]
        received = problem.layers[cuts[s] - 1].output_bytes if s else 0.0
        received += part[-1].output_bytes if s < stages - 1 else 0.0
        need = device.reserved_bytes + sum(x.state_bytes for x in part)
        need += least_in_flight(problem.schedule, s, stages, m) * sum(x.activation_bytes for x in part)
        need += max(x.workspace_bytes for x in part) + problem.receive_window * received
        if device.memory_bytes is not None and need > device.memory_bytes:
            return None
        times = problem.times.get(device.id)
        if times is None:
            work = sum(x.flops for x in part) / device.flops_per_s
            entries.append(StageTimes(work / 3, work * 2 / 3, 0.0))
        else:
            at = slice(cuts[s], cuts[s + 1])
            entries.append(
                StageTimes(sum(times.forward_s[at]), sum(times.backward_s[at]), sum(times.optimizer_s[at]))
            )
    if problem.objective == "bottleneck":
        return max(x.forward_s + x.backward_s for x in entries)
    for s, device in enumerate(order):
        neighbours = (s > 0) + (s < stages - 1)
        beside = device.handling_s + device.action_s + device.neighbour_s * neighbours
        beside = (beside + device.step_s / problem.microbatches) / 2
        entries[s] = StageTimes(
            entries[s].forward_s + beside, entries[s].backward_s + beside, entries[s].optimizer_s
        )

    def hop(a, b, size):
        link = links.get((a.id, b.id))
        shared = tuple(
            (x.name, size / x.bandwidth_bytes_per_s) for x in problem.shared if (a.id, b.id) in set(x.links)
        )
        if link is None:
            return MessageTimes(0.0, 0.0, shared)
        return MessageTimes(size / link.bandwidth_bytes_per_s, link.latency_s, shared)

    boundaries = []
    for s in range(stages - 1):
        size = problem.layers[cuts[s + 1] - 1].output_bytes
        boundaries.append(BoundaryTimes(hop(order[s], order[s + 1], size), hop(order[s + 1], order[s], size)))
    in_flight = [least_in_flight(problem.schedule, s, stages, m) for s in range(stages)]
    return simulate(problem.schedule, m, in_flight, entries, boundaries).iteration_s


def repeated(seed):
    """Small: a few layers, a pattern, a few layers; caps, pins, windows, equal devices on some."""
    r = random.Random(seed)
    base = random_problem(seed, objective="bottleneck", times={})
    period, count = r.choice([1, 2, 3]), r.randint(5, 8)

    def numbers():
        return (
            r.uniform(0.3, 3), r.uniform(1, 10), r.uniform(0.1, 2), r.uniform(0.1, 2),
            r.choice([0.0, r.uniform(0, 5)]),
        )  # fmt: skip

    pattern = [numbers() for _ in range(period)]
    rows = [pattern[i % period] for i in range(count)]
    for i in [*range(r.randint(0, 2)), *range(count - r.randint(0, 2), count)]:
        rows[i] = numbers()
    layers = tuple(layer(i, *row) for i, row in enumerate(rows))
    total = sum(x.state_bytes for x in layers)
    alike = r.random() < 0.4
    devices = tuple(
        d.model_copy(
            update={
                "memory_bytes": None if d.memory_bytes is None else total * r.uniform(0.35, 1.2),
                "flops_per_s": r.choice([1.0, 2.0]) if alike else d.flops_per_s,
            }
        )
        for d in base.devices
    )
    return base.model_copy(update={"layers": layers, "devices": devices})


def encoders(blocks, devices, seed=0, memory=False):
    """The paper's shape: an embedding, blocks of three layers, two small layers at the end."""
    r = random.Random(seed)
    flops = [5.0, *([10.0, 7.0, 7.0] * blocks), 0.5, 0.01]
    state = [30.0, *([4.0] * (3 * blocks)), 1.0, 0.1]
    room = 2.2 * sum(state) / devices
    return Problem(
        layers=tuple(layer(i, f, s) for i, (f, s) in enumerate(zip(flops, state, strict=True))),
        devices=tuple(
            Device(
                id=f"n{d}/cpu:0",
                flops_per_s=r.uniform(1, 2),
                memory_bytes=room / (1 + r.random()) if memory else None,
            )
            for d in range(devices)
        ),
        microbatches=8,
        objective="bottleneck",
    )
