"""Brute force over plans and over how their stages run: depths, weight gradients behind, recomputation.

From the records, in the contract's words; for 2–3 devices and 3–5 layers.
"""

from __future__ import annotations

import itertools
import random
from typing import NamedTuple

from tests.planner.planner_problems import random_problem

from skyctl.schedule.actions import check_in_flight
from skyctl.schedule.simulation import simulate
from skyctl.schedule.step_times import BoundaryTimes, MessageTimes, StageTimes


class StageRun(NamedTuple):
    """One stage: device, its layers, and how it runs."""

    device: int
    start: int
    stop: int
    in_flight: int
    deferred: int
    recompute: bool


def split_problem(seed, **fixed):
    """Small, with weight gradients, deferred bytes and memory that often binds."""
    r = random.Random(seed)
    given = random_problem(seed, most_devices=3, most_layers=5, microbatches=r.randint(2, 4), **fixed)
    times = {}
    for d in given.devices:
        base = [x.flops / d.flops_per_s for x in given.layers]
        backward = tuple(x * r.uniform(0.5, 1) for x in base)
        times[d.id] = {
            "forward_s": tuple(x * r.uniform(0.3, 0.5) for x in base),
            "backward_s": backward,
            "optimizer_s": tuple(r.choice([0.0, r.uniform(0, 0.3)]) for _ in base),
            "weight_s": tuple(x * r.uniform(0.0, 0.6) for x in backward),
        }
    layers = [
        {**dict(x), "deferred_bytes": r.choice([0.0, r.uniform(0, 1)]), "activation_bytes": r.uniform(0.5, 5)}
        for x in given.layers
    ]
    return given.model_validate({**dict(given), "layers": layers, "times": times})


def need_bytes(problem, run):
    layers, p, q = problem.layers, run.start, run.stop
    part = layers[p:q]
    received = (layers[p - 1].output_bytes if p else 0) + (part[-1].output_bytes if q < len(layers) else 0)
    need = problem.devices[run.device].reserved_bytes + problem.receive_window * received
    need += sum(x.state_bytes for x in part)
    if run.recompute:
        kept = [
            min(layers[i].activation_bytes, layers[i - 1].output_bytes) if i else layers[i].activation_bytes
            for i in range(p, q)
        ]
        return need + run.in_flight * sum(kept) + max(x.activation_bytes + x.workspace_bytes for x in part)
    if problem.schedule == "zero-bubble":
        need += (run.deferred + 1) * sum(x.deferred_bytes for x in part)
    return need + run.in_flight * sum(x.activation_bytes for x in part) + max(x.workspace_bytes for x in part)


def _columns(problem, device):
    if device.id in problem.times:
        times = problem.times[device.id]
        return times.forward_s, times.backward_s, times.optimizer_s, times.weight_s
    seconds = [x.flops / device.flops_per_s for x in problem.layers]
    return [x / 3 for x in seconds], [x * 2 / 3 for x in seconds], [0.0] * len(seconds), [0.0] * len(seconds)


def value_s(problem, runs):
    entries = []
    for run in runs:
        f, b, o, w = (sum(x[run.start : run.stop]) for x in _columns(problem, problem.devices[run.device]))
        entries.append(StageTimes(f, b + f, o) if run.recompute else StageTimes(f, b, o, w))
    if problem.objective == "bottleneck":
        return max(x.forward_s + x.backward_s for x in entries)
    links = {(x.source, x.target): x for x in problem.links}

    def hop(a, b, size):
        ends = (problem.devices[a].id, problem.devices[b].id)
        shared = tuple(
            (x.name, size / x.bandwidth_bytes_per_s) for x in problem.shared if ends in set(x.links)
        )
        link = links.get(ends)
        return (
            MessageTimes(size / link.bandwidth_bytes_per_s, link.latency_s, shared)
            if link
            else MessageTimes(shared=shared)
        )

    ways = [
        BoundaryTimes(hop(a.device, b.device, size), hop(b.device, a.device, size))
        for a, b in itertools.pairwise(runs)
        for size in [problem.layers[a.stop - 1].output_bytes]
    ]
    return simulate(
        problem.schedule,
        problem.microbatches,
        [x.in_flight for x in runs],
        entries,
        ways,
        deferred_weights=[x.deferred for x in runs],
    ).iteration_s


def _stage_runs(problem, device, p, q):
    """Every way to run that stage that its memory allows."""
    m = problem.microbatches
    for recompute in (False, True) if problem.recompute else (False,):
        most = m - 1 if problem.schedule == "zero-bubble" and not recompute else 0
        for in_flight in range(1, m + 1):
            for deferred in range(most + 1):
                run = StageRun(device, p, q, in_flight, deferred, recompute)
                has = problem.devices[device].memory_bytes
                if has is None or need_bytes(problem, run) <= has:
                    yield run


def best_s(problem):
    """The least value over everything that may be decided; None where nothing fits."""
    count, n = len(problem.layers), len(problem.devices)
    best = None
    for stages in range(1, min(n, count) + 1):
        for order in itertools.permutations(range(n), stages):
            ids = [problem.devices[d].id for d in order]
            if problem.first_stage is not None and ids[0] not in problem.first_stage:
                continue
            if problem.last_stage is not None and ids[-1] not in problem.last_stage:
                continue
            for inner in itertools.combinations(range(1, count), stages - 1):
                cuts = (0, *inner, count)
                ways = [
                    list(_stage_runs(problem, d, p, q))
                    for d, (p, q) in zip(order, itertools.pairwise(cuts), strict=True)
                ]
                for runs in itertools.product(*ways):
                    numbers = [x.in_flight for x in runs]
                    if check_in_flight(problem.schedule, numbers, problem.microbatches) is None:
                        value = value_s(problem, runs)
                        best = value if best is None else min(best, value)
    return best
