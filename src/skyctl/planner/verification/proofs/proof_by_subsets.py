"""Is there a plan whose stages all take less than a limit? Exact, over every set of devices.

Stages are placed from the last one on, so the number of stages to the end, and with it 1F1B's memory, is
known. Per set of devices (identical ones are counted, not named) what is kept is the first layer q such that
exactly these devices can hold [q, L); a smaller q leaves less to do and a stage may always be shortened, so
the least q is enough. If received messages wait in a window, a shorter stage may need more memory: then
the table keeps every q, a row of booleans per set. Sets of one size are taken together, in numpy.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from skyctl.planner.verification.problem_data import DeviceKind, ProblemData, Proof

FEW_SETS = 1 << 17
"""Tried before anything else: well below a second."""
MAX_SETS = 1 << 23
"""23 different devices: about five seconds and half a gigabyte."""
MAX_WINDOW_WORK = 6e10
MAX_WINDOW_CELLS = 5e7

Small = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


def few(facts: ProblemData, below_s: float) -> Proof:
    """``prove`` where that is quick."""
    return prove(facts, below_s, FEW_SETS)


def prove(facts: ProblemData, below_s: float, most_sets: int = MAX_SETS) -> Proof:
    """Whether no plan's stages all take less than ``below_s``."""
    sets = _Sets(facts)
    if sets.count > most_sets:
        return Proof(None, f"{facts.devices} devices have too many different subsets to try all")
    if facts.windowed:
        cells = float(sets.count) * (facts.layers + 1)
        if cells > MAX_WINDOW_CELLS or cells * facts.layers * len(facts.kinds) > MAX_WINDOW_WORK:
            return Proof(None, "too many subsets to try all with a receive window")
        exists = _rows(facts, sets, below_s)
    else:
        exists = _least(facts, sets, below_s)
    if exists:
        return Proof(False, "a plan below the bound exists (all subsets)")
    return Proof(True, f"no subset of the {facts.devices} devices covers the layers below it (all subsets)")


class _Sets:
    """A set of devices as a number: how many of each kind, mixed radix."""

    def __init__(self, facts: ProblemData) -> None:
        self.sizes = [len(kind.members) for kind in facts.kinds]
        self.strides = []
        self.count = 1
        for size in self.sizes:
            self.strides.append(self.count)
            self.count *= size + 1

    def levels(self, most: int) -> Iterator[tuple[int, Small]]:
        """(stages, the sets with that many devices), from one device on."""
        numbers = np.arange(self.count, dtype=np.int32)
        sizes = np.zeros(self.count, dtype=np.int16)
        for k in range(len(self.sizes)):
            sizes += self.digit(numbers, k).astype(np.int16)
        order = np.argsort(sizes, kind="stable").astype(np.int32)
        edges = np.searchsorted(sizes[order], np.arange(most + 2))
        for stages in range(1, most + 1):
            yield stages, order[edges[stages] : edges[stages + 1]]

    def digit(self, numbers: Small, k: int) -> Small:
        """How many devices of kind k."""
        return numbers // np.int32(self.strides[k]) % np.int32(self.sizes[k] + 1)


def _least(facts: ProblemData, sets: _Sets, below_s: float) -> bool:
    none = facts.layers + 1
    reach = np.full(sets.count, none, dtype=np.int32)
    reach[0] = facts.layers
    tables: dict[tuple[int, int], Small] = {}
    for stages, numbers in sets.levels(facts.most_stages):
        in_flight = facts.least_in_flight(stages)
        best = np.full(len(numbers), none, dtype=np.int32)
        for k, kind in enumerate(facts.kinds):
            if stages == 1 and not kind.may_be_last:
                continue
            if (k, in_flight) not in tables:
                tables[k, in_flight] = _first_starts(facts, kind, in_flight, below_s)
            has = np.flatnonzero(sets.digit(numbers, k))
            after = reach[numbers[has] - np.int32(sets.strides[k])]
            best[has] = np.minimum(best[has], tables[k, in_flight][after])
        reach[numbers] = best
        if (best == 0).any():
            return True
    return False


def _first_starts(facts: ProblemData, kind: DeviceKind, in_flight: int, below_s: float) -> Small:
    """Per stop, the least start of a stage that fits; L + 1 where there is none, and at L + 1."""
    anywhere = kind._replace(may_be_last=True)  # only one stage ends at L, and the caller asks it
    far = facts.farthest(anywhere, in_flight, below_s, facts.work(kind.device))
    ends = np.arange(facts.layers + 2)
    least = np.searchsorted(far, ends, side="left")
    if not kind.may_be_first:
        least = np.maximum(least, 1)
    least[(least >= ends) | (ends > facts.layers)] = facts.layers + 1
    return least.astype(np.int32)


def _rows(facts: ProblemData, sets: _Sets, below_s: float) -> bool:
    covered: Floats = np.zeros((sets.count, facts.layers + 1), dtype=np.float32)
    covered[0, facts.layers] = 1
    tables: dict[tuple[int, int], Floats] = {}
    for stages, numbers in sets.levels(facts.most_stages):
        in_flight = facts.least_in_flight(stages)
        for k, kind in enumerate(facts.kinds):
            if stages == 1 and not kind.may_be_last:
                continue
            if (k, in_flight) not in tables:
                tables[k, in_flight] = _pairs(facts, kind, in_flight, below_s)
            has = numbers[np.flatnonzero(sets.digit(numbers, k))]
            reached = covered[has - np.int32(sets.strides[k])] @ tables[k, in_flight]
            covered[has] = np.maximum(covered[has], reached > 0.5)
        if covered[numbers, 0].any():
            return True
    return False


def _pairs(facts: ProblemData, kind: DeviceKind, in_flight: int, below_s: float) -> Floats:
    """[stop, start]: 1 where that stage fits."""
    work = facts.work(kind.device)
    anywhere = kind._replace(may_be_last=True)
    out: Floats = np.zeros((facts.layers + 1, facts.layers + 1), dtype=np.float32)
    for start in range(facts.layers):
        out[:, start] = facts.stops(anywhere, start, in_flight, below_s, work)
    return out
