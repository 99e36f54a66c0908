"""Seconds of sums over routes, added up anew from records for ``verify``: lines, ways, processors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from skyctl.planner.verification.reading import SummedRange
from skyctl.planner.verification.ring_orders import fastest_rings
from skyctl.planner.verification.route_bound import Wires
from skyctl.planner.verification.routes import (
    Trees,
    edge_waits,
    is_ring,
    is_star,
    ring,
    stars,
    ways_from_root,
)
from skyctl.planner.verification.summed_bytes import FormatBytes
from skyctl.records.problem import Device, Problem

SHORT_FROM_S = 4e-8
"""Seconds of a byte on the busiest line from which on messages are short."""


class CheckedSums:
    """One problem's lines, and its layers' bytes in the format that it sums in."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.devices = {device.id: device for device in problem.devices}
        self.delayed = problem.rhythm.delay == 1
        self.format = FormatBytes(problem)
        self.sizes = self.format.both()
        self.wires = Wires(problem)
        self._used: dict[object, dict[object, float]] = {}
        self._latency: dict[Trees, float] = {}
        self._simple: dict[object, bool] = {}

    def chosen_trees(self, start: int, stop: int, devices: Sequence[str]) -> Trees:
        """The ring or star in which the group's bytes take least, alone; of equal ones the first."""
        size = math.fsum(self.sizes[start:stop])
        rings = fastest_rings(self.wires, devices) if self.problem.sync != "star" else ()
        layouts = [*(ring(order) for order in rings), *stars(devices, self.problem.sync)]
        spent_s = [size * self.byte_s(x, devices) + self.latency_s(x) for x in layouts]
        return layouts[spent_s.index(min(spent_s))]

    def group_bytes(self, group: SummedRange) -> float:
        """Of its gradients as they are sent, in all passes."""
        return math.fsum(self.sizes[group.start : group.stop])

    def used_s(self, trees: Trees, replicas: Sequence[str]) -> Mapping[object, float]:
        """By link, shared resource and helper's processor, seconds of a byte there over all trees."""
        key = (trees, tuple(replicas))
        if key not in self._used:
            sent: dict[tuple[str, str], float] = {}
            for tree in trees:
                for edge in (*tree.up, *tree.down):
                    sent[edge] = sent.get(edge, 0.0) + tree.share
            lines = self.wires
            used: dict[object, float] = {
                edge: n * lines.link_s[edge] for edge, n in sent.items() if edge in lines.link_s
            }
            for edge, n in sent.items():
                for number in lines.over.get(edge, ()):
                    used[number] = used.get(number, 0.0) + n * lines.shared_s[number]
            for name in {end for edge in sent for end in edge} - set(replicas):
                used[name] = self.processor_byte_s(self.devices[name], trees)
            self._used[key] = used
        return self._used[key]

    def byte_s(self, trees: Trees, replicas: Sequence[str]) -> float:
        """Seconds of one byte of gradient on what is busiest, over all trees."""
        return max(self.used_s(trees, replicas).values(), default=0.0)

    def latency_s(self, trees: Trees) -> float:
        """The longest way up to a tree's root and down from it, in seconds of latency, in all passes."""
        if trees not in self._latency:
            latency_s = self.wires.latency_s
            self._latency[trees] = max(
                sum(
                    max(ways_from_root(edges, x.root, child, latency_s).values())
                    for edges, child in ((x.up, 0), (x.down, 1))
                )
                for x in trees
            )
        return self._latency[trees]

    def fill_s(self, group: SummedRange, chunk_bytes: float) -> float:
        """Seconds beyond all bytes on what is busiest, as messages pass trees edge by edge.

        None for a ring or a star: there every line has something to send from the beginning on.
        """
        if self._is_simple(group):
            return 0.0
        total = self.group_bytes(group)
        work: dict[object, float] = {}
        head: dict[object, float] = {}
        tail: dict[object, float] = {}
        for tree in group.trees:
            message_bytes = min(chunk_bytes, tree.share * total)
            for edge, before_s, after_s in edge_waits(tree, self.wires.line_s):
                used: list[tuple[object, float]] = [(edge, self.wires.link_s.get(edge, 0.0))]
                used += [(k, self.wires.shared_s[k]) for k in self.wires.over.get(edge, ())]
                for name in {*edge} - set(group.devices):
                    adds = edge in tree.up and name == edge[1]
                    added_s = self.devices[name].reduce_byte_s if adds else 0.0
                    used.append((name, self.devices[name].message_byte_s + added_s))
                for what, byte_s in used:
                    work[what] = work.get(what, 0.0) + tree.share * byte_s * total
                    head[what] = min(before_s * message_bytes, head.get(what, math.inf))
                    tail[what] = min(after_s * message_bytes, tail.get(what, math.inf))
        most = max(work.values(), default=0.0)
        return self.format.passes * (max((work[x] + head[x] + tail[x] for x in work), default=0.0) - most)

    def _is_simple(self, group: SummedRange) -> bool:
        key = (group.trees, group.devices)
        if key not in self._simple:
            self._simple[key] = is_ring(*key) or is_star(*key)
        return self._simple[key]

    def message_factor(self, byte_s: float) -> float:
        """How often ``message_byte_s`` counts, if a byte takes so long or longer on the busiest line."""
        return 2.0 if self.delayed and byte_s >= SHORT_FROM_S else 1.0

    def processor_byte_s(self, entry: Device, trees: Trees, factor: float = 1.0) -> float:
        """Seconds of a device's processor for a byte of gradient: adding, sending, receiving."""
        added = passed = 0.0
        for tree in trees:
            added += tree.share * sum(edge[1] == entry.id for edge in tree.up)
            passed += tree.share * sum(entry.id in edge for edge in (*tree.up, *tree.down))
        return entry.reduce_byte_s * added + factor * entry.message_byte_s * passed
