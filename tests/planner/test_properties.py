"""The properties of proved optima at a fixed number of microbatches, whatever the problem (hypothesis)."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.planner.planner_problems import random_problem

from skyctl.errors import InfeasibleError
from skyctl.planner.api import plan
from skyctl.records.problem import Device, Link

SEEDS = st.integers(0, 10**6)
NEW = "new/cpu:0"
ROUNDING = 1 + 1e-9


def value(problem, strategy="optimal"):
    """The strategy's objective; infinite where nothing fits. A plan called optimal must be proved."""
    try:
        planned = plan(problem, strategy)
    except InfeasibleError:
        return math.inf
    assert strategy != "optimal" or planned.certificate.status == "optimal"
    return planned.certificate.value_s


@settings(max_examples=40)
@given(SEEDS)
def test_optimal_then_heuristic_then_even(seed):
    p = random_problem(seed)
    optimal, heuristic, even = (value(p, name) for name in ("optimal", "heuristic", "even"))
    assert optimal <= heuristic * ROUNDING
    assert heuristic <= even * ROUNDING


@settings(max_examples=30)
@given(SEEDS, st.sampled_from([0.3, 1.0, 3.0]), st.booleans(), st.booleans())
def test_another_device_never_makes_it_worse(seed, speed, roomy, linked):
    """It may stay unused; its links cost nothing while it does."""
    p = random_problem(seed)
    memory = None if roomy else sum(layer.state_bytes for layer in p.layers) / 3
    device = Device(id=NEW, flops_per_s=speed, memory_bytes=memory)
    links = tuple(
        Link(source=a, target=b, latency_s=0.1, bandwidth_bytes_per_s=2.0)
        for other in p.devices
        for a, b in ((NEW, other.id), (other.id, NEW))
        if linked
    )
    more = p.model_copy(update={"devices": (*p.devices, device), "links": (*p.links, *links)})
    assert value(more) <= value(p) * ROUNDING


@settings(max_examples=30)
@given(SEEDS, st.sampled_from([1.05, 1.3, 2.0]), st.booleans())
def test_more_memory_never_makes_it_worse(seed, times, everywhere):
    p = random_problem(seed)
    roomier = tuple(
        device
        if device.memory_bytes is None or (i and not everywhere)
        else device.model_copy(update={"memory_bytes": device.memory_bytes * times})
        for i, device in enumerate(p.devices)
    )
    assert value(p.model_copy(update={"devices": roomier})) <= value(p) * ROUNDING


@settings(max_examples=40)
@given(SEEDS, st.integers(0, 100), st.sampled_from([1.1, 2.0, 10.0]))
def test_a_faster_link_never_makes_it_worse(seed, which, times):
    """This holds if nothing is shared."""
    p = random_problem(seed, shared=(), objective="iteration")
    if not p.links:
        return
    links = list(p.links)
    link = links[which % len(links)]
    faster = link.model_copy(update={"bandwidth_bytes_per_s": link.bandwidth_bytes_per_s * times})
    links[which % len(links)] = faster
    assert value(p.model_copy(update={"links": tuple(links)})) <= value(p) * ROUNDING


@settings(max_examples=25)
@given(SEEDS, st.randoms(use_true_random=False))
def test_the_order_of_the_devices_does_not_matter(seed, r):
    p = random_problem(seed)
    devices = list(p.devices)
    r.shuffle(devices)
    other = p.model_copy(update={"devices": tuple(devices)})
    assert value(other) == pytest.approx(value(p), rel=1e-9)


@settings(max_examples=25)
@given(SEEDS, st.sampled_from([0.5, 3.0, 1e-3]))
def test_scaling_all_seconds_scales_the_value(seed, x):
    p = random_problem(seed)
    fields = ("forward_s", "backward_s", "optimizer_s")
    times = {
        name: layer_times.model_copy(
            update={field: tuple(v * x for v in getattr(layer_times, field)) for field in fields}
        )
        for name, layer_times in p.times.items()
    }
    slower = p.model_copy(
        update={
            "times": times,
            "devices": tuple(d.model_copy(update={"flops_per_s": d.flops_per_s / x}) for d in p.devices),
            "links": tuple(
                k.model_copy(
                    update={
                        "latency_s": k.latency_s * x,
                        "bandwidth_bytes_per_s": k.bandwidth_bytes_per_s / x,
                    }
                )
                for k in p.links
            ),
            "shared": tuple(
                s.model_copy(update={"bandwidth_bytes_per_s": s.bandwidth_bytes_per_s / x}) for s in p.shared
            ),
        }
    )
    assert value(slower) == pytest.approx(x * value(p), rel=1e-9)
