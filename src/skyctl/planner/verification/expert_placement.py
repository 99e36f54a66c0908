"""Checks a placement of experts and its bound, without the solver and the search that made it.

Let p be the price of a device's time, and q that of a byte of its room. An expert costs at least the least
of p · its time there + q · its bytes, over all devices. All devices together give Σp · T + Σ q · room. So
T is at least (Σ of the experts' least costs − Σ q · room) / Σp, whatever the prices. And an expert on two
devices takes at least as long as on the two fastest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from skyctl.planner.expert_problem import (
    MOST_COPIES,
    ExpertPlacement,
    PlacementProblem,
    PlacementWitness,
    device_times,
)

ROUNDING = 1e-9


@dataclass(frozen=True)
class PlacementVerdict:
    """Attributes: ``problems``: what is wrong, none if it holds; ``bound_s``: what the witness proves."""

    problems: tuple[str, ...]
    bound_s: float


def verify_expert_placement(problem: PlacementProblem, placement: ExpertPlacement) -> PlacementVerdict:
    """Checks who holds what against memory, and the time and bound that the placement claims."""
    if len(placement.shares) != len(problem.experts):
        wrong = f"{len(placement.shares)} experts are placed, the problem has {len(problem.experts)}"
        return PlacementVerdict((wrong,), 0.0)
    counts = (len(placement.witness.times), len(placement.witness.memory))
    if counts != (len(problem.devices), len(problem.devices)):
        return PlacementVerdict((f"the witness prices {counts} of {len(problem.devices)} devices",), 0.0)
    problems = _holders(problem, placement.shares) + _memory(problem, placement.shares)
    time_s = max(device_times(problem, placement.shares).values())
    if abs(time_s - placement.time_s) > ROUNDING * time_s:
        problems.append(f"the slowest device takes {time_s} s, the placement says {placement.time_s}")
    bound_s = lower_bound_s(problem, placement.witness)
    if placement.bound_s > bound_s * (1 + ROUNDING):
        problems.append(f"the witness proves {bound_s} s, the placement says {placement.bound_s}")
    return PlacementVerdict(tuple(problems), bound_s)


def lower_bound_s(problem: PlacementProblem, witness: PlacementWitness) -> float:
    """The bound that prices prove: no placement of the problem is faster. 0 where a price is no price."""
    if not all(price >= 0 for price in (*witness.times, *witness.memory)) or not sum(witness.times):
        return 0.0
    prices = list(zip(problem.devices, witness.times, witness.memory, strict=True))
    total = -sum(memory * max(0, device.room_bytes) for device, _, memory in prices)
    pairs_s = 0.0
    for expert in problem.experts:
        able = [part for part in prices if part[0].room_bytes >= expert.memory_bytes]
        if not able:
            return 0.0
        total += min(
            time * device.token_s * expert.tokens + memory * expert.memory_bytes
            for device, time, memory in able
        )
        rates = sorted((1 / device.token_s for device, _, _ in able), reverse=True)[:MOST_COPIES]
        pairs_s = max(pairs_s, expert.tokens / sum(rates))
    return max(total / sum(witness.times), pairs_s)


def _holders(problem: PlacementProblem, shares: Sequence[Mapping[str, float]]) -> list[str]:
    names, problems = {device.name for device in problem.devices}, []
    for expert, held in zip(problem.experts, shares, strict=True):
        if not 1 <= len(held) <= MOST_COPIES:
            problems.append(f"{expert.name} is on {len(held)} devices, at least 1 and at most {MOST_COPIES}")
        if unknown := sorted(held.keys() - names):
            problems.append(f"{expert.name} is on {unknown[0]}, which the problem does not have")
        whole = abs(sum(held.values()) - 1) <= ROUNDING
        if not whole or not all(share >= 0 for share in held.values()):
            problems.append(f"the shares of {expert.name} are {dict(held)}, not parts of 1")
    return problems


def _memory(problem: PlacementProblem, shares: Sequence[Mapping[str, float]]) -> list[str]:
    problems = []
    for device in problem.devices:
        pairs = zip(problem.experts, shares, strict=True)
        need = sum(expert.memory_bytes for expert, held in pairs if device.name in held)
        if need and need > device.room_bytes:
            problems.append(f"{device.name} holds experts of {need} bytes, it has {device.room_bytes} left")
    return problems
