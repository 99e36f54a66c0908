"""The problems of the recording, each from its seed alone.

Those of ``suites`` are the ones that the tests hold against brute force. The others are made here of the same
parts: small enough that each search ends by itself, so that no clock decides what is found.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, get_args

from surviving.lab import of_tests

from skyctl.records.problem import Device, Layer, LayerTimes, Link, Parallel, Problem, SharedResource
from skyctl.records.rhythm import Rhythm

PIPELINES, DATA, HYBRIDS = 500, 300, 200
DATA_SEED, HYBRID_SEED = 22_000, 24_000
"""Of the tests' random suites."""
MIXED, MIXED_SEED = 128, 41_000
WIDE, WIDE_SEED = 100, 43_000
"""Problems of each form; the first seed."""
STRATEGIES = ("auto", "pipeline", "data", "hybrid")
"""As ``plan --parallel`` names them."""
FORMS = ("plain", "delay", "staleness", "rounds", "compressed")
"""When sums count and in what they are made: as the problem's ``rhythm`` and ``sync_format`` say."""
MBIT, MB = 1e6 / 8, 1e6


def suites() -> Iterator[tuple[str, Problem]]:
    """The 500 pipelines, 300 data-parallel and 200 hybrid problems that tests hold against brute force."""
    pipelines, data = of_tests("behaviour.instances"), of_tests("planner.data_problems")
    hybrids = of_tests("planner.hybrid_problems")
    for i in range(PIPELINES):
        yield f"pipeline {i:03d}", Problem.model_validate(pipelines.suite_problem(i))
    for i in range(DATA):
        yield f"data {i:03d}", data.random_data_problem(DATA_SEED + i)
    for i in range(HYBRIDS):
        yield f"hybrid {i:03d}", hybrids.random_hybrid_problem(HYBRID_SEED + i)


def mixed(count: int = MIXED) -> Iterator[tuple[str, str, str, Problem]]:
    """(name, strategy, form, problem): each of the random problems by every strategy and in every form.

    Problems are not validated: some ask for what does not go together, and that is to be refused.
    """
    for i in range(count):
        plain = _uncertain(i)
        for form in FORMS:
            problem = _in_form(plain, form, i)
            for strategy in STRATEGIES:
                parallel = "data" if strategy == "auto" else strategy
                yield f"{i:03d}", strategy, form, problem.model_copy(update={"parallel": parallel})


def _uncertain(i: int) -> Problem:
    """2 to 4 devices, 3 to 5 layers: a test's random hybrid, half of them with uncertain figures."""
    seed = MIXED_SEED + i
    sizes: dict[str, Any] = {"devices": (2, 4), "layers": (3, 5), "microbatches": (2, 4)}
    problem: Problem = of_tests("planner.hybrid_problems").random_hybrid_problem(seed, **sizes)
    r = random.Random(seed)
    update: dict[str, Any] = {"recompute": r.random() < 0.5}
    if r.random() < 0.5:
        update["devices"] = tuple(
            device.model_copy(update={"time_uncertainty": 0.05, "overhead_uncertainty": 0.1})
            for device in problem.devices
        )
        update["links"] = tuple(link.model_copy(update={"uncertainty": 0.2}) for link in problem.links)
    return problem.model_copy(update=update)


def _in_form(problem: Problem, form: str, i: int) -> Problem:
    data = of_tests("planner.data_problems")
    made: Problem = problem
    unrounded = "float32" if problem.sync_format == "fixed32" else problem.sync_format
    if form == "delay":
        made = data.delayed(problem)
    elif form == "compressed":
        made = data.compressed(problem, MIXED_SEED + i)
    elif form == "staleness":
        update = {"rhythm": Rhythm(staleness=(1, 4, None)[i % 3]), "sync_format": "float32"}
        made = problem.model_copy(update={**update, "sync": ("auto", "star")[i % 2]})
    elif form == "rounds":
        outer = {"outer_lr": 0.7, "outer_momentum": 0.9} if i % 4 == 1 else {}
        rhythm = Rhythm(local_steps=("auto", 4, 16)[i % 3], prox_mu=0.1 * (i % 2), **outer)  # type: ignore[arg-type]
        nodes = tuple((device.id.split("/")[0],) for device in problem.devices)
        owners = nodes if i % 5 == 0 else None
        made = problem.model_copy(update={"rhythm": rhythm, "sync_format": unrounded, "owners": owners})
    return made


def wide() -> Iterator[tuple[str, Problem]]:
    """A hundred of each form, larger than what can always be gone through: how far ``verify`` follows."""
    for parallel in get_args(Parallel):
        for i in range(WIDE):
            yield f"{parallel} {i:03d}", wide_problem(WIDE_SEED + i, parallel)


def wide_problem(seed: int, parallel: Parallel) -> Problem:
    """3 to 6 devices (one in five: 7 to 9) in one or two sites, 6 to 12 layers, 4 to 12 microbatches.

    As workloads have them: uplinks are shared on half of those of two sites, memory is limited on a third.
    Pipelines recompute on half, and go through all schedules and both objectives.
    """
    r = random.Random(seed)
    count, depth, sites = r.randint(3, 6), r.randint(6, 12), r.choice([1, 2])
    if seed % 5 == 0:
        count = r.randint(7, 9)
    layers = [
        Layer(
            name=f"layer{i}", flops=r.uniform(1, 5) * 1e9, state_bytes=r.uniform(1, 8) * MB,
            activation_bytes=r.uniform(0.1, 0.5) * MB, output_bytes=r.uniform(0.05, 0.4) * MB,
            workspace_bytes=0.1 * MB, gradient_bytes=r.uniform(0.2, 2) * MB,
        )
        for i in range(depth)
    ]  # fmt: skip
    whole = sum(layer.state_bytes for layer in layers)
    limited = r.random() < 1 / 3
    devices = [
        Device(
            id=f"n{d}/cpu:0", flops_per_s=r.uniform(1, 8) * 1e10,
            memory_bytes=whole * r.uniform(0.4, 3) if limited else None, handling_s=1e-3, action_s=5e-4,
            neighbour_s=3e-4, reduce_byte_s=5e-10, message_byte_s=r.uniform(1, 5) * 1e-9,
        )
        for d in range(count)
    ]  # fmt: skip
    times = {}
    for device in devices:
        forward = [layer.flops / device.flops_per_s * r.uniform(0.25, 0.4) for layer in layers]
        backward = [2 * x * r.uniform(0.8, 1.2) for x in forward]
        times[device.id] = LayerTimes(
            forward_s=tuple(forward), backward_s=tuple(backward), optimizer_s=(1e-4,) * depth
        )
    site = {device.id: d % sites for d, device in enumerate(devices)}
    pairs = [(a, b) for a in site for b in site if a != b]
    links = [
        Link(source=a, target=b, latency_s=r.uniform(0.1, 1) * 1e-3,
             bandwidth_bytes_per_s=r.uniform(200, 1000) * MBIT)
        if site[a] == site[b]
        else Link(source=a, target=b, latency_s=0.02, bandwidth_bytes_per_s=r.uniform(20, 100) * MBIT)
        for a, b in pairs
    ]  # fmt: skip
    away = [(a, b) for a, b in pairs if site[a] < site[b]]
    shared = []
    if away and r.random() < 0.5:
        shared = [SharedResource(name="uplink", bandwidth_bytes_per_s=50 * MBIT, links=tuple(away))]
    of_form: dict[str, Any] = {"sync": r.choice(["auto", "auto", "ring", "star"])}
    if parallel == "pipeline":
        schedule = r.choice(["1f1b", "1f1b", "zero-bubble", "eager-1f1b", "gpipe", "sequential"])
        objective = r.choice(["iteration", "iteration", "bottleneck"])
        of_form = {"schedule": schedule, "objective": objective, "recompute": r.random() < 0.5}
    found: dict[str, Any] = {"layers": layers, "devices": devices, "times": times, "links": links}
    return Problem(**found, **of_form, shared=tuple(shared), microbatches=r.randint(4, 12), parallel=parallel)


def sites_problem(seed: int, devices: int, depth: int, sites: int, microbatches: int) -> Problem:
    """Sites of unequal devices, dealt out one after the other: 1 Gbit/s within, 100 Mbit/s and 20 ms between.

    Speeds of 0.3–3, random layers with messages of 0.5–2 MB and gradients of 4 MB.
    """
    r = random.Random(seed)
    layers = [
        Layer(
            name=f"layer{i}", flops=r.uniform(0.5, 2), state_bytes=16 * MB, activation_bytes=2 * MB,
            output_bytes=r.uniform(0.5, 2) * MB, gradient_bytes=4 * MB,
        )
        for i in range(depth)
    ]  # fmt: skip
    named = [
        Device(id=f"s{d % sites}n{d // sites}/cpu:0", flops_per_s=r.uniform(0.3, 3), memory_bytes=None)
        for d in range(devices)
    ]
    links = [
        Link(source=a.id, target=b.id, latency_s=1e-4, bandwidth_bytes_per_s=1000 * MBIT)
        if a.id[:2] == b.id[:2]
        else Link(source=a.id, target=b.id, latency_s=0.02, bandwidth_bytes_per_s=100 * MBIT)
        for a in named
        for b in named
        if a is not b
    ]
    return Problem(layers=tuple(layers), devices=tuple(named), links=tuple(links), microbatches=microbatches)
