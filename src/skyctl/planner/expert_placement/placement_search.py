"""Places experts so that the slowest device is fastest, and weighs moves against what they gain."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from skyctl.errors import InfeasibleError, InputError, UndecidedError
from skyctl.planner.expert_placement.placement_solver import (
    GAP,
    Holders,
    balanced_shares,
    fits,
    fractional_prices,
    search_holders,
)
from skyctl.planner.expert_problem import (
    MOST_COPIES,
    ExpertPlacement,
    PlacementProblem,
    PlacementWitness,
    device_times,
)
from skyctl.planner.verification.expert_placement import lower_bound_s

Shares = Sequence[Mapping[str, float]]


def place_experts(
    problem: PlacementProblem, time_limit_s: float = 10.0, *, copies: int = MOST_COPIES
) -> ExpertPlacement:
    """The placement whose slowest device is fastest: each expert on one device, or split between two.

    Deterministic if ``is_optimal``; else it depends on how far the search got.

    Args:
        copies: an expert is on so many devices at most. ``bound_s`` is that of experts cut anywhere.

    Raises:
        InfeasibleError: an expert fits on no device, or proved that they don't fit together.
        UndecidedError: none was found in that time, and it is not proved that there is none.
    """
    deadline = time.perf_counter() + time_limit_s
    witness, bound_s = _bound(problem)
    start = _dealt_whole(problem) if copies == 1 else _filled(problem, bound_s)
    candidates = [] if start is None else [_placement(problem, start, witness)]
    is_best = copies == 1 and len({(e.tokens, e.memory_bytes) for e in problem.experts}) == 1
    if candidates and (is_best or candidates[0].time_s <= bound_s * (1 + GAP)):
        return replace(candidates[0], is_optimal=True)
    found, is_proved = search_holders(problem, bound_s, start, deadline, copies=copies)
    if found is not None:
        candidates.append(_placement(problem, found, witness))
    elif is_proved:
        raise _too_small(problem)
    if not candidates:
        raise UndecidedError(
            f"no placement of {len(problem.experts)} experts was found in {time_limit_s:g} s",
            hint="a larger time_limit_s, or more memory for experts",
        )
    best = min(candidates, key=lambda placement: placement.time_s)
    return replace(best, is_optimal=is_proved)


def even_placement(problem: PlacementProblem) -> ExpertPlacement:
    """As many experts on each device, in their order: what a placement is compared with.

    Raises:
        InfeasibleError: a device has no room for its part.
    """
    count = len(problem.experts)
    holders = [[e * len(problem.devices) // count] for e in range(count)]
    for d, device in enumerate(problem.devices):
        need = sum(
            expert.memory_bytes for expert, held in zip(problem.experts, holders, strict=True) if d in held
        )
        if need and need > device.room_bytes:
            raise InfeasibleError(
                f"an even part of the experts is {need} bytes, {device.name} has {device.room_bytes} left",
                hint="place_experts keeps to the memory of each device",
            )
    return _placement(problem, holders, _bound(problem)[0])


@dataclass(frozen=True)
class BetterPlacement:
    """The best placement for the steps that are left.

    Attributes:
        moves: (expert, the device that sends it, None: none has it; the device that receives it).
        move_s: seconds that the slowest line takes for all moves.
        gain_s: what is saved over all steps left, moves paid; None: the current holders can't go on.
    """

    placement: ExpertPlacement
    moves: tuple[tuple[str, str | None, str], ...]
    move_s: float
    gain_s: float | None


def better_placement(
    problem: PlacementProblem, current: Shares, steps: int, time_limit_s: float = 10.0
) -> BetterPlacement:
    """The placement with the least time for the steps left, the time of moving experts there included.

    It stays with the current holders, their shares dealt anew, unless moves gain more than they cost. An
    expert is sent by the current holder with the fastest line; each line carries what it sends and receives.

    Args:
        problem: with the loads as they are now, and the devices that are there now.
        current: by expert, its holders by name, as in ``ExpertPlacement.shares``. Holders that are not among
            the devices are lost. An expert all of whose holders are lost is sent by no device: it comes from
            its last copy.
        steps: how many are left.

    Raises:
        InfeasibleError, UndecidedError: as ``place_experts``.
        InputError: ``current`` is of another number of experts, or no step is left.
    """
    if len(current) != len(problem.experts) or steps < 1:
        raise InputError(
            f"better_placement needs the holders of {len(problem.experts)} experts and a step at least, it "
            f"has those of {len(current)} and steps={steps}"
        )
    deadline = time.perf_counter() + time_limit_s
    witness, bound_s = _bound(problem)
    number = {device.name: d for d, device in enumerate(problem.devices)}
    held = [sorted(number[name] for name in own if name in number) for own in current]
    senders = [min(own, key=lambda d: (problem.devices[d].byte_s, d), default=None) for own in held]
    stays = held if all(held) and fits(problem, held) else None
    start = stays or _filled(problem, bound_s)
    per_step = _line_seconds(problem, held, senders, steps)
    found, is_proved = search_holders(problem, bound_s, start, deadline, per_step)
    if found is None and is_proved:
        raise _too_small(problem)
    best: BetterPlacement | None = None
    stay_s = _placement(problem, stays, witness).time_s * steps if stays else None
    for holders in (stays, found, start):
        if holders is None:
            continue
        placement = _placement(problem, holders, witness)
        moves = _moves(problem, placement, held, senders)
        move_s = _move_s(problem, moves)
        total_s = placement.time_s * steps + move_s
        if best is None or total_s < best.placement.time_s * steps + best.move_s:
            best = BetterPlacement(placement, moves, move_s, None if stay_s is None else stay_s - total_s)
    if best is None:
        raise UndecidedError(f"no placement was found in {time_limit_s:g} s", hint="a larger time_limit_s")
    return best


def _bound(problem: PlacementProblem) -> tuple[PlacementWitness, float]:
    """Prices and what they prove; InfeasibleError where an expert fits on no device, or all on none."""
    largest = max(problem.devices, key=lambda device: device.room_bytes)
    for expert in problem.experts:
        if expert.memory_bytes > largest.room_bytes:
            raise InfeasibleError(
                f"expert {expert.name} needs {expert.memory_bytes} bytes and fits on no device: the most is "
                f"{largest.room_bytes} bytes, on {largest.name}",
                hint="smaller experts, fewer other layers there, or a device with more memory",
            )
    witness = fractional_prices(problem)
    if witness is None:
        raise _too_small(problem)
    return witness, lower_bound_s(problem, witness)


def _too_small(problem: PlacementProblem) -> InfeasibleError:
    need = sum(expert.memory_bytes for expert in problem.experts)
    have = sum(max(0, device.room_bytes) for device in problem.devices)
    return InfeasibleError(
        f"{len(problem.experts)} experts of {need} bytes don't fit together on {len(problem.devices)} "
        f"devices with {have} bytes left for them",
        hint="fewer or smaller experts, or a device more",
    )


def _placement(problem: PlacementProblem, holders: Holders, witness: PlacementWitness) -> ExpertPlacement:
    shares = tuple(balanced_shares(problem, holders))
    time_s = max(device_times(problem, shares).values())
    return ExpertPlacement(shares, time_s, lower_bound_s(problem, witness), witness)


def _dealt_whole(problem: PlacementProblem) -> Holders | None:
    """Experts by falling load, each onto the device that is done with it first; the best of equal ones."""
    time_s = [0.0] * len(problem.devices)
    room = [device.room_bytes for device in problem.devices]
    holders: Holders = [[] for _ in problem.experts]
    for e in sorted(range(len(holders)), key=lambda e: (-problem.experts[e].tokens, e)):
        expert = problem.experts[e]
        done_s = {
            d: time_s[d] + device.token_s * expert.tokens
            for d, device in enumerate(problem.devices)
            if room[d] >= expert.memory_bytes
        }
        if not done_s:
            return None
        first = min(done_s, key=lambda d: (done_s[d], d))
        holders[e] = [first]
        time_s[first] = done_s[first]
        room[first] -= expert.memory_bytes
    return holders


def _filled(problem: PlacementProblem, bound_s: float) -> Holders | None:
    """Experts by falling load onto the device with the most time left; what does not fit there is split."""
    left = [bound_s / device.token_s for device in problem.devices]
    room = [device.room_bytes for device in problem.devices]
    holders: Holders = [[] for _ in problem.experts]
    order = sorted(range(len(holders)), key=lambda e: (-problem.experts[e].tokens, e))
    for e in order:
        expert = problem.experts[e]
        able = [d for d in range(len(left)) if room[d] >= expert.memory_bytes]
        able.sort(key=lambda d: (-left[d], d))
        if not able:
            return None
        first, *others = able
        holders[e] = [first]
        rest = expert.tokens - max(0.0, left[first])
        if rest > 0 and others and left[others[0]] > 0:
            holders[e].append(others[0])
            left[others[0]] -= rest
            left[first] = 0.0
        else:
            left[first] -= expert.tokens
        for d in holders[e]:
            room[d] -= expert.memory_bytes
    return holders


def _line_seconds(
    problem: PlacementProblem, held: Holders, senders: Sequence[int | None], steps: int
) -> list[list[list[float]]]:
    """By expert, device and line: what a copy of the expert there takes on that line, per step left."""
    devices = problem.devices
    out = []
    for expert, own, sender in zip(problem.experts, held, senders, strict=True):
        out.append([[0.0] * len(devices) for _ in devices])
        for d in range(len(devices)):
            for line in {d, sender} - {None} if d not in own else ():
                assert line is not None
                out[-1][d][line] = expert.weight_bytes * devices[line].byte_s / steps
    return out


def _moves(
    problem: PlacementProblem, placement: ExpertPlacement, held: Holders, senders: Sequence[int | None]
) -> tuple[tuple[str, str | None, str], ...]:
    moves = []
    for expert, shares, own, sender in zip(problem.experts, placement.shares, held, senders, strict=True):
        before = {problem.devices[d].name for d in own}
        source = None if sender is None else problem.devices[sender].name
        moves += [(expert.name, source, name) for name in shares if name not in before]
    return tuple(moves)


def _move_s(problem: PlacementProblem, moves: Sequence[tuple[str, str | None, str]]) -> float:
    sizes = {expert.name: expert.weight_bytes for expert in problem.experts}
    return max(
        device.byte_s * sum(sizes[name] for name, *ends in moves if device.name in ends)
        for device in problem.devices
    )
