"""The paper's experiment: what it plays, and that its bounds hold."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from skyctl.errors import UndecidedError
from skyctl.paper.paper_experiment import (
    allocator_factors,
    bert_layers,
    least_sum_s,
    max_range_flops,
    paper_problem,
    published_heuristic,
    run_experiment,
    slowdown_factors,
)
from skyctl.paper.two_stage_heuristic import two_stage_cuts
from skyctl.planner.api import assigned, plan
from skyctl.records.problem import Device, Layer, Problem


def a_chain(seed: int, *, caps: bool = True) -> Problem:
    """A few layers and devices, sequential, one microbatch."""
    r = random.Random(seed)
    layers = tuple(
        Layer(
            name=f"l{i}",
            flops=r.uniform(1, 3),
            state_bytes=r.uniform(1, 2),
            activation_bytes=r.uniform(0, 1),
            output_bytes=0.0,
        )
        for i in range(r.randint(3, 7))
    )
    need = sum(layer.state_bytes + layer.activation_bytes for layer in layers)
    devices = tuple(
        Device(
            id=f"n{d}/cpu:0",
            flops_per_s=r.uniform(0.2, 1),
            memory_bytes=r.uniform(0.3, 0.8) * need if caps else None,
        )
        for d in range(r.randint(3, 4))
    )
    return Problem(
        layers=layers, devices=devices, microbatches=1, schedule="sequential", objective="iteration"
    )


def test_the_published_draw() -> None:
    assert slowdown_factors(16)[:8] == [4, 6, 4, 7, 7, 3, 7, 2]
    assert slowdown_factors(64)[:15] == slowdown_factors(16)
    assert len(slowdown_factors(64)) == 63
    assert set(slowdown_factors(64)) == {2, 3, 4, 5, 6, 7}
    assert all(1 <= f < 2 for f in allocator_factors(64))


def test_the_model_is_berts() -> None:
    layers = bert_layers(160)
    assert len(layers) == 483
    parameters = math.fsum(layer.state_bytes for layer in layers) / 8
    assert parameters == pytest.approx(160 * 12.6e6 + 32e6, rel=0.02)
    single = bert_layers(160, 1)
    assert layers[1].flops == pytest.approx(32 * single[1].flops)
    assert layers[1].activation_bytes == pytest.approx(32 * single[1].activation_bytes)
    assert layers[1].state_bytes == single[1].state_bytes


@pytest.mark.parametrize("seed", range(25))
def test_filling_is_a_bound_on_the_sum(seed: int) -> None:
    asked = a_chain(seed)
    bound_s, best_s = least_sum_s(asked), math.inf
    ids, count = [d.id for d in asked.devices], len(asked.layers)
    for size in range(1, len(ids) + 1):
        for used in itertools.permutations(ids, size):
            for inner in itertools.combinations(range(1, count), size - 1):
                cuts = [0, *inner, count]
                try:
                    planned = assigned(asked, list(zip(used, cuts, cuts[1:], strict=False)))
                except Exception:
                    continue
                best_s = min(best_s, planned.predicted.iteration_s)
    assert bound_s <= best_s * (1 + 1e-12)


def test_filling_is_met_where_one_device_holds_everything() -> None:
    asked = a_chain(1, caps=False)
    fastest = max(device.flops_per_s for device in asked.devices)
    assert least_sum_s(asked) == pytest.approx(sum(layer.flops for layer in asked.layers) / fastest)
    assert plan(asked, "heuristic").predicted.iteration_s == pytest.approx(least_sum_s(asked))
    assert max_range_flops(asked, 0.0) == 0.0


def test_a_model_that_does_not_fit_has_no_least_sum() -> None:
    asked = a_chain(1)
    tiny = tuple(device.model_copy(update={"memory_bytes": 0.5}) for device in asked.devices)
    assert least_sum_s(asked.model_copy(update={"devices": tiny})) == math.inf


def test_the_published_heuristic_needs_a_layer_a_device() -> None:
    with pytest.raises(UndecidedError, match="a layer for each device"):
        two_stage_cuts([1.0], [1.0], [9.0, 9.0], [1.0, 1.0])
    with pytest.raises(UndecidedError, match="no split that fits"):
        two_stage_cuts([1.0] * 4, [1.0] * 4, [1.0, 2.0], [1.0, 1.0])


def test_it_takes_measured_times_where_there_are_any() -> None:
    asked = paper_problem(16, 40, "chain")
    plain = published_heuristic(asked)
    seconds = {d.id: [layer.flops / d.flops_per_s for layer in asked.layers] for d in asked.devices}
    times = {
        name: {
            "forward_s": [x / 3 for x in row],
            "backward_s": [2 * x / 3 for x in row],
            "optimizer_s": [0.0] * len(row),
        }
        for name, row in seconds.items()
    }
    equal = [d.model_copy(update={"flops_per_s": 1.0}).model_dump() for d in asked.devices]
    timed = Problem.model_validate({**asked.model_dump(), "devices": equal, "times": times})
    assert published_heuristic(timed) == plain


def test_one_size_of_the_experiment() -> None:
    paper = run_experiment([(16, 40)], limit_s=0.2)
    assert [case.execution for case in paper.cases] == ["chain", "chain-sum", "steady", "step"]
    for case in paper.cases:
        assert [entry.strategy for entry in case.entries] == ["even", "dynamic", "heuristic", "optimal"]
        assert case.entry("even").reduction == 0.0
    chain, summed, steady, step = paper.cases
    assert steady.entry("optimal").status == "optimal"
    assert steady.entry("optimal").reduction <= steady.limit
    assert summed.entry("optimal").reduction <= summed.limit + 1e-12
    assert chain.entry("even").time_s == pytest.approx(summed.entry("even").time_s)
    for name in ("even", "dynamic"):  # the same plan, in other executions
        assert step.entry(name).time_s >= steady.entry(name).time_s
        assert chain.entry(name).time_s > step.entry(name).time_s
    assert paper.memory == ()


def test_the_least_sum_beats_every_plan_of_the_chain() -> None:
    paper = run_experiment([(32, 80)], ["chain", "chain-sum"])
    chain, summed = paper.cases
    least_s = summed.entry("optimal").time_s
    assert all(least_s <= entry.time_s for case in (chain, summed) for entry in case.entries)
    assert summed.entry("optimal").status == "optimal"
