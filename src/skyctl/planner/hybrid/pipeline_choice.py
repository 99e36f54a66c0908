"""A good pipeline over given devices with given microbatches: a few orders, balanced cuts, played alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations

from skyctl.planner.cost_model import CostModel, Placement
from skyctl.planner.evaluation import step_lower_bound_s
from skyctl.planner.heuristic.balance import balance_layers, near_neighbours
from skyctl.planner.heuristic.quick_beam import QuickBeam
from skyctl.planner.hybrid.exact_hybrids import number_of_pipelines, pipelines_of
from skyctl.planner.hybrid.hybrid_model import HybridModel
from skyctl.records.problem import Problem

MOST_PERMUTED = 4
"""Devices up to which every order is tried, with balanced cuts."""
MOST_LOOKED_AT = 500
"""Orders and cuts of a set of devices up to which all are looked at."""
BEAM_WIDTH, BEAM_PROBES, BEAM_TOLERANCE = 16, 8, 0.01


class PipelineChoice:
    """Good pipelines by their devices, and by microbatches in powers of two, which the cuts hardly need."""

    def __init__(self, model: HybridModel) -> None:
        self.model = model
        self._placements: dict[tuple[tuple[int, ...], int], Placement | None] = {}

    def best(self, devices: tuple[int, ...], share: int) -> Placement | None:
        """A good pipeline over all of these devices, ascending; None: none that fits was found."""
        about = min(1 << (share.bit_length() - 1), self.model.microbatches)
        for tried in dict.fromkeys((about, share)):  # more microbatches may not fit with these cuts
            placement = self._solved(devices, tried)
            if placement is not None and self.model.play(placement, share) is not None:
                return placement
        return None

    def _solved(self, devices: tuple[int, ...], share: int) -> Placement | None:
        key = (devices, share)
        if key not in self._placements:
            self._placements[key] = self._solve(devices, share)
        return self._placements[key]

    def _solve(self, devices: tuple[int, ...], share: int) -> Placement | None:
        costs = self.model.costs(share)
        best_s, best = None, None
        for placement in self._candidates(costs, devices):
            if best_s is not None and step_lower_bound_s(costs, placement) >= best_s:
                continue
            play = self.model.play(placement, share)
            if play is not None and (best_s is None or play.floor_s < best_s):
                best_s, best = play.floor_s, placement
        return best or self._roomiest(devices, share)

    def _roomiest(self, devices: tuple[int, ...], share: int) -> Placement | None:
        """A pipeline where memory is what counts, over some of the devices: by beam search."""
        costs = self.model.costs(share)
        if costs.unlimited or len(devices) <= MOST_PERMUTED:
            return None
        beam = QuickBeam(CostModel(_only(costs.problem, devices)))
        stages = beam.best(BEAM_WIDTH, BEAM_PROBES, BEAM_TOLERANCE)
        if stages is None:
            return None
        placement = tuple(stage._replace(device=devices[stage.device]) for stage in stages)
        return placement if self.model.play(placement, share) is not None else None

    def _candidates(self, costs: CostModel, devices: tuple[int, ...]) -> Iterator[Placement]:
        """Balanced cuts in some orders, then all of few orders and cuts."""
        for order in dict.fromkeys(_orders(costs, devices)):
            balanced = balance_layers(costs, order)
            if balanced is not None:
                yield balanced[1]
        if number_of_pipelines(len(devices), costs.layers) <= MOST_LOOKED_AT:
            yield from (x for x in pipelines_of(devices, costs.layers) if costs.is_allowed(x))


def _only(problem: Problem, devices: tuple[int, ...]) -> Problem:
    """The problem with these devices alone."""
    kept = [problem.devices[d] for d in devices]
    names = {device.id for device in kept}

    def those(allowed: Sequence[str] | None) -> tuple[str, ...] | None:
        return None if allowed is None else tuple(name for name in allowed if name in names)

    return problem.model_copy(
        update={
            "devices": tuple(kept),
            "times": {name: times for name, times in problem.times.items() if name in names},
            "links": (),
            "shared": (),
            "first_stage": those(problem.first_stage),
            "last_stage": those(problem.last_stage),
        }
    )


def _orders(costs: CostModel, devices: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Orders to try: all of few devices; near neighbours, fast first and fast last, inventory of more."""
    if len(devices) <= MOST_PERMUTED:
        yield from permutations(devices)
        return
    fast = sorted(devices, key=lambda d: (costs.work_s[d][-1], d))
    near = near_neighbours(costs, fast)
    for order in (near, near[::-1], fast, fast[::-1], list(devices)):
        placed = _with_ends(costs, order)
        if placed is not None:
            yield placed


def _with_ends(costs: CostModel, order: list[int]) -> tuple[int, ...] | None:
    """The order with devices that may be first and last at its ends; None: they are not among them."""
    firsts = [d for d in order if d in costs.may_be_first]
    if not firsts:
        return None
    first = order[0] if order[0] in costs.may_be_first else firsts[0]
    lasts = [d for d in order if d in costs.may_be_last and d != first]
    if not lasts:
        return None
    last = order[-1] if order[-1] in lasts else lasts[-1]
    return (first, *(d for d in order if d not in (first, last)), last)
