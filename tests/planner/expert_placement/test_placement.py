"""Placements of experts: as good as any by brute force, within their bound, verified without the solver."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from skyctl.errors import InfeasibleError, InputError
from skyctl.planner.expert_placement.placement_search import (
    better_placement,
    even_placement,
    place_experts,
)
from skyctl.planner.expert_problem import (
    ExpertDevice,
    ExpertLoad,
    ExpertPlacement,
    PlacementProblem,
    PlacementWitness,
)
from skyctl.planner.verification.expert_placement import verify_expert_placement

SPEEDS = (80, 40, 20, 20, 10, 10)


def drawn(seed: int) -> PlacementProblem:
    """A few experts of unequal loads and devices with little room."""
    draw = random.Random(seed)
    count = draw.randint(2, 3)
    experts = [
        ExpertLoad(f"e{e}", draw.choice([0, 1, 5, 10, 40, 100]), draw.randint(1, 4))
        for e in range(draw.randint(2, 5 if count == 3 else 6))
    ]
    devices = [
        ExpertDevice(
            f"d{d}", draw.uniform(0.1, 1.0), draw.randint(4, 12), draw.uniform(0, 0.3), draw.randint(0, 3)
        )
        for d in range(count)
    ]
    return PlacementProblem(experts, devices)


def brute_force(problem: PlacementProblem) -> float | None:
    """The least time over all holders; the fullest set of devices (Hall) says what their shares can do."""
    devices = range(len(problem.devices))
    sets = [frozenset(s) for size in (1, 2, 3) for s in itertools.combinations(devices, size)]
    rate = {s: sum(1 / problem.devices[d].token_s for d in s) for s in sets}
    options = [s for s in sets if len(s) <= 2]
    best = None
    for holders in itertools.product(options, repeat=len(problem.experts)):
        need = [0] * len(devices)
        for expert, held in zip(problem.experts, holders, strict=True):
            for d in held:
                need[d] += expert.memory_bytes
        if any(n > device.room_bytes for n, device in zip(need, problem.devices, strict=True)):
            continue
        own = list(zip(problem.experts, holders, strict=True))
        time_s = max(sum(expert.tokens for expert, held in own if held <= s) / rate[s] for s in sets)
        best = time_s if best is None else min(best, time_s)
    return best


def test_equals_brute_force_on_100_small_instances() -> None:
    infeasible = 0
    for seed in range(100):
        problem = drawn(seed)
        wanted = brute_force(problem)
        if wanted is None:
            infeasible += 1
            with pytest.raises(InfeasibleError):
                place_experts(problem)
            continue
        placement = place_experts(problem)
        assert placement.is_optimal, seed
        assert placement.time_s == pytest.approx(wanted, rel=2e-6), seed
        assert verify_expert_placement(problem, placement).problems == ()
        assert placement.bound_s <= wanted * (1 + 1e-9)
    assert 0 < infeasible < 50


def test_64_experts_on_16_nodes_are_within_a_tenth_of_the_bound() -> None:
    draw = random.Random(0)
    experts = [ExpertLoad(f"e{e}", 8192 / (e + 1) ** 0.9, draw.randint(80, 120)) for e in range(64)]
    devices = [
        ExpertDevice(f"d{d}", 1e-4 * draw.choice([1, 2, 4, 8]), draw.randint(450, 900), 2e-5 * draw.random())
        for d in range(16)
    ]
    problem = PlacementProblem(experts, devices)
    placement = place_experts(problem, time_limit_s=10.0)
    verdict = verify_expert_placement(problem, placement)
    assert verdict.problems == ()
    assert placement.time_s <= 1.1 * verdict.bound_s


def unequal(loads: list[float], byte_s: float = 0.0) -> PlacementProblem:
    experts = [ExpertLoad(f"e{e}", load, 10, 10) for e, load in enumerate(loads)]
    devices = [
        ExpertDevice(f"d{d}", 0.1 / speed, 400, 0.0005, byte_s=byte_s) for d, speed in enumerate(SPEEDS)
    ]
    return PlacementProblem(experts, devices)


def test_faster_than_an_even_placement() -> None:
    problem = unequal([100.0] * 64)
    placement, even = place_experts(problem, 1.0), even_placement(problem)
    assert verify_expert_placement(problem, even).problems == ()
    assert even.time_s >= 1.5 * placement.time_s


def test_moves_are_made_if_they_gain_more_than_they_cost() -> None:
    before = place_experts(unequal([100.0] * 12), 1.0)
    drifted = [400.0, 400.0, *[50.0] * 10]
    cheap = better_placement(unequal(drifted, byte_s=1e-4), before.shares, steps=1000, time_limit_s=60.0)
    assert cheap.moves
    assert cheap.gain_s is not None
    assert cheap.gain_s > 0
    problem = unequal(drifted, byte_s=100.0)
    dear = better_placement(problem, before.shares, steps=1, time_limit_s=1.0)
    assert (dear.moves, dear.move_s, dear.gain_s) == ((), 0.0, 0.0)
    for found in (cheap, dear):
        assert verify_expert_placement(problem, found.placement).problems == ()


def test_experts_of_a_lost_device_go_elsewhere_whatever_it_costs() -> None:
    whole = unequal([100.0] * 12, byte_s=100.0)
    before = place_experts(whole, 1.0)
    left = replace(whole, devices=whole.devices[1:])
    found = better_placement(left, before.shares, steps=1, time_limit_s=1.0)
    lost = {f"e{e}" for e, held in enumerate(before.shares) if set(held) == {"d0"}}
    assert {name for name, source, _ in found.moves if source is None} == lost != set()
    assert found.gain_s is None
    assert verify_expert_placement(left, found.placement).problems == ()


def test_an_expert_that_fits_nowhere_is_named() -> None:
    problem = PlacementProblem(
        [ExpertLoad("small", 1, 1), ExpertLoad("large", 1, 9)],
        [ExpertDevice("a", 1.0, 10, held_bytes=3), ExpertDevice("b", 1.0, 8)],
    )
    with pytest.raises(InfeasibleError, match=r"expert large needs 9 bytes.*most is 8 bytes, on b"):
        place_experts(problem)


def test_what_is_wrong_with_a_placement_is_found() -> None:
    problem = unequal([100.0] * 12)
    good = place_experts(problem)
    first, *others = good.shares
    small = replace(problem, devices=[replace(device, memory_bytes=9) for device in problem.devices])
    for wrong, among, message in (
        (replace(good, shares=({}, *others)), problem, "on 0 devices"),
        (replace(good, shares=({"x": 1.0}, *others)), problem, "on x"),
        (replace(good, shares=({"d0": 0.5}, *others)), problem, "not parts of 1"),
        (replace(good, shares=tuple(others)), problem, "11 experts are placed"),
        (replace(good, time_s=good.time_s / 2), problem, "the placement says"),
        (replace(good, bound_s=good.bound_s * 1.01), problem, "the witness proves"),
        (replace(good, witness=PlacementWitness((1.0,), (0.0,))), problem, "the witness prices"),
        (good, small, "it has 9 left"),
    ):
        assert message in " ".join(verify_expert_placement(among, wrong).problems)
    assert first


@pytest.mark.parametrize("is_even", [True, False])
@pytest.mark.parametrize("seed", range(15))
def test_whole_experts_are_placed_as_brute_force_does(seed: int, is_even: bool) -> None:
    problem = drawn(seed)
    if is_even:
        alike = [ExpertLoad(expert.name, 7.0, 2) for expert in problem.experts]
        problem = replace(problem, experts=alike)
    times = []
    for places in itertools.product(problem.devices, repeat=len(problem.experts)):
        need = dict.fromkeys((device.name for device in problem.devices), (0.0, 0))
        for expert, device in zip(problem.experts, places, strict=True):
            time_s, held = need[device.name]
            need[device.name] = time_s + device.token_s * expert.tokens, held + expert.memory_bytes
        if all(need[device.name][1] <= max(0, device.room_bytes) for device in problem.devices):
            times.append(max(time_s for time_s, _ in need.values()))
    if not times:
        with pytest.raises(InfeasibleError):
            place_experts(problem, copies=1)
        return
    placement = place_experts(problem, copies=1)
    assert {len(shares) for shares in placement.shares} == {1}
    assert placement.time_s == pytest.approx(min(times), rel=1e-5)
    assert not verify_expert_placement(problem, placement).problems


@pytest.mark.parametrize(
    ("experts", "devices", "message"),
    [
        ([], [ExpertDevice("a", 1.0, 1)], "needs experts"),
        ([ExpertLoad("e", 1, 1)] * 2, [ExpertDevice("a", 1.0, 1)], "two experts have the name 'e'"),
        ([ExpertLoad("e", float("nan"), 1)], [ExpertDevice("a", 1.0, 1)], "tokens of 'e'"),
        ([ExpertLoad("e", 1, 1)], [ExpertDevice("a", 0.0, 1)], "compute_s of 'a' must be above 0"),
    ],
)
def test_figures_that_are_none(experts: list[ExpertLoad], devices: list[ExpertDevice], message: str) -> None:
    with pytest.raises(InputError, match=message):
        PlacementProblem(experts, devices)


def test_moves_need_steps_and_holders() -> None:
    problem = unequal([100.0] * 12)
    before: ExpertPlacement = place_experts(problem)
    with pytest.raises(InputError, match="steps=0"):
        better_placement(problem, before.shares, steps=0)
    with pytest.raises(InputError, match="those of 11"):
        better_placement(problem, before.shares[1:], steps=1)
