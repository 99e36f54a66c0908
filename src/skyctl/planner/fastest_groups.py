"""The fastest ring or star of each group of layers, looked up by replicas."""

from __future__ import annotations

import math

import numpy as np

from skyctl.planner.candidate import GroupRoutes, SumGroup
from skyctl.planner.routes.layout_table import LayoutTable, LayoutTerms
from skyctl.planner.routes.route_layouts import Layout
from skyctl.planner.step_costs import StepCosts
from skyctl.planner.sum_costs import chunk_bytes_at


class FastestGroups:
    """The sums of any layers over any replicas, in the ring or star that takes the least time by itself."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs, self._table = costs, LayoutTable(costs)
        self._terms: dict[tuple[int, ...], LayoutTerms] = {}
        self._routed: dict[Layout, GroupRoutes] = {}

    def group(self, start: int, stop: int, replicas: tuple[int, ...]) -> SumGroup:
        """The sum of layers [start, stop); of layouts that are as fast the first one."""
        size_bytes = math.fsum(self._costs.layer_bytes[start:stop])
        if replicas not in self._terms:
            self._terms[replicas] = self._table.terms(replicas)
        terms = self._terms[replicas]
        layout = terms.layouts[int(np.argmin(size_bytes * terms.byte_s + terms.latency_s))]
        if layout not in self._routed:
            self._routed[layout] = self._costs.routed(layout)
        routed = self._routed[layout]
        chunk_bytes = chunk_bytes_at(routed.byte_s, self._costs.passes)
        return SumGroup(start, stop, replicas, size_bytes, routed, chunk_bytes)
