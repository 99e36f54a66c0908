"""Which plans keep every stage within a limit: exact, over every subset of devices, for few kinds of them.

``reach[subset]`` is the smallest q such that exactly these devices, in some order, hold layers [q, L): the
number of stages from here to the end is known, so the memory of 1F1B is too. If received messages wait in
a window, a shorter stage may need more memory; then the search keeps all q, as the bits of an integer.
Source of the idea: ``best[S] = max over d of reach(best[S∖d], d, T)``, folklore of chains-on-chains.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left

from skyctl.planner.cost_model import CostModel, Placement, StageAssignment

MAX_STATES = 1 << 16
MAX_STATES_WINDOW = 1 << 9
STATES_A_LOOK = 1 << 8
"""Subsets between two looks at the clock."""


class DeviceGroups:
    """Devices that are alike where links do not matter: a subset is then a count per group."""

    def __init__(self, model: CostModel) -> None:
        kinds: dict[object, list[int]] = {}
        for d in range(model.devices):
            key = (
                model.timing_class[d],
                model.available_bytes[d],
                d in model.may_be_first,
                d in model.may_be_last,
            )
            kinds.setdefault(key, []).append(d)
        self.members = list(kinds.values())
        self.strides: list[int] = []
        self.states = 1
        for group in self.members:
            self.strides.append(self.states)
            self.states *= len(group) + 1

    def digits(self, state: int) -> list[int]:
        """How many devices of each group a state has used."""
        out = []
        for group in self.members:
            state, number = divmod(state, len(group) + 1)
            out.append(number)
        return out

    def free(self) -> list[list[int]]:
        """Each group's devices, last first, to be taken from with ``pop``."""
        return [group[::-1] for group in self.members]


def subsets_are_few(model: CostModel, most: int = MAX_STATES) -> bool:
    """Whether there are at most ``most`` subsets, and few enough for this search."""
    return DeviceGroups(model).states <= min(most, MAX_STATES_WINDOW if _windowed(model) else MAX_STATES)


def _windowed(model: CostModel) -> bool:
    return bool(model.receive_window) and not model.unlimited


def placement_within(
    model: CostModel, limit_s: float, *, strict: bool = False, deadline: float = math.inf
) -> Placement | None:
    """A plan whose stages all take at most (``strict``: less than) ``limit_s`` per microbatch, or None: there
    is none (proved).

    Raises:
        TimeoutError: undecided at the deadline, in seconds of ``time.perf_counter``.
    """
    cover = _cover_bits if _windowed(model) else _cover_least
    return cover(model, limit_s, strict, deadline)


def _keep_deadline(state: int, deadline: float) -> None:
    if state % STATES_A_LOOK == 0 and time.perf_counter() > deadline:
        raise TimeoutError


def _first_within(model: CostModel, device: int, stop: int, limit_s: float, strict: bool) -> int:
    """The smallest start with [start, stop) within the limit (stop itself when none is)."""
    if limit_s == math.inf:
        return 0
    work = model.work_s[device]
    start = max(0, bisect_left(work, work[stop] - limit_s, 0, stop) - 2)
    while start < stop and not (
        work[stop] - work[start] < limit_s or (not strict and work[stop] - work[start] == limit_s)
    ):
        start += 1
    return start


def _lowest(model: CostModel, device: int, in_flight: int, limit_s: float, strict: bool) -> list[int]:
    """Per stop, the smallest start that time and memory allow (stop itself when none)."""
    out = [0] * (model.layers + 1)
    low = 0 if device in model.may_be_first else 1
    for stop in range(1, model.layers + 1):
        low = max(low, _first_within(model, device, stop, limit_s, strict))
        while low < stop and not model.fits(device, low, stop, in_flight):
            low += 1
        out[stop] = low
    return out


def _cover_least(model: CostModel, limit_s: float, strict: bool, deadline: float) -> Placement | None:
    layers, groups = model.layers, DeviceGroups(model)
    in_flight = [0, *(model.least_in_flight(0, n) for n in range(1, model.max_stages + 1))]
    if model.unlimited:
        in_flight = [1] * len(in_flight)
    tables: dict[tuple[int, int], list[int]] = {}
    reach = [layers + 1] * groups.states
    reach[0] = layers
    chosen = [-1] * groups.states
    last = [group[0] in model.may_be_last for group in groups.members]
    for state in range(1, groups.states):
        _keep_deadline(state, deadline)
        digits = groups.digits(state)
        stages = sum(digits)
        if stages >= len(in_flight):
            continue
        k = in_flight[stages]
        best, by = layers + 1, -1
        for g, number in enumerate(digits):
            if not number or (stages == 1 and not last[g]):
                continue
            stop = reach[state - groups.strides[g]]
            if stop > layers:
                continue
            table = tables.get((g, k))
            if table is None:
                table = tables[g, k] = _lowest(model, groups.members[g][0], k, limit_s, strict)
            start = table[stop]
            if start < stop and start < best:
                best, by = start, g
        reach[state] = best
        chosen[state] = by
        if best == 0:
            return _trace_least(layers, groups, (reach, chosen), state)
    return None


def _trace_least(
    layers: int, groups: DeviceGroups, tables: tuple[list[int], list[int]], state: int
) -> Placement:
    reach, chosen = tables
    placement = []
    free = groups.free()
    while state:
        g = chosen[state]
        rest = state - groups.strides[g]
        placement.append(StageAssignment(free[g].pop(), reach[state], reach[rest] if rest else layers))
        state = rest
    return tuple(placement)


def _cover_bits(model: CostModel, limit_s: float, strict: bool, deadline: float) -> Placement | None:
    layers, groups = model.layers, DeviceGroups(model)
    rows: dict[tuple[int, int], list[int]] = {}
    reach = [0] * groups.states
    reach[0] = 1 << layers
    for state in range(1, groups.states):
        _keep_deadline(state, deadline)
        digits = groups.digits(state)
        stages = sum(digits)
        if stages > model.max_stages:
            continue
        k = model.least_in_flight(0, stages)
        for g, number in enumerate(digits):
            after = reach[state - groups.strides[g]] if number else 0
            d = groups.members[g][0]
            if not after or (stages == 1 and d not in model.may_be_last):
                continue
            row = rows.get((g, k))
            if row is None:
                row = rows[g, k] = _starts(model, d, k, limit_s, strict)
            while after:
                bit = after & -after
                after ^= bit
                reach[state] |= row[bit.bit_length() - 1]
        if reach[state] & 1:
            return _trace_bits(model, groups, (reach, rows), state)
    return None


def _trace_bits(
    model: CostModel,
    groups: DeviceGroups,
    tables: tuple[list[int], dict[tuple[int, int], list[int]]],
    state: int,
) -> Placement:
    reach, rows = tables
    placement = []
    free = groups.free()
    start = 0
    while state:
        digits = groups.digits(state)
        k = model.least_in_flight(0, sum(digits))
        last = sum(digits) == 1
        g, stop = next(
            (g, stop)
            for g, number in enumerate(digits)
            if number and (g, k) in rows and (not last or groups.members[g][0] in model.may_be_last)
            for stop in range(start + 1, model.layers + 1)
            if reach[state - groups.strides[g]] >> stop & 1 and rows[g, k][stop] >> start & 1
        )
        placement.append(StageAssignment(free[g].pop(), start, stop))
        start = stop
        state -= groups.strides[g]
    return tuple(placement)


def _starts(model: CostModel, device: int, in_flight: int, limit_s: float, strict: bool) -> list[int]:
    """By stop, the bit set of starts that time and memory allow."""
    out = [0] * (model.layers + 1)
    pinned = 0 if device in model.may_be_first else 1
    for stop in range(1, model.layers + 1):
        low = max(pinned, _first_within(model, device, stop, limit_s, strict))
        for start in range(low, stop):
            if model.fits(device, start, stop, in_flight):
                out[stop] |= 1 << start
    return out
