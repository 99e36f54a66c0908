"""A data-parallel step's time and memory, added up anew from records for ``verify``: layer by layer.

Nothing is shared with ``planner/data``. Where that has closed formulas, layers' sums are played here from the
last to the first, and routes are walked edge by edge.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from skyctl.planner.verification.route_bound import Wires
from skyctl.planner.verification.summed_bytes import FormatBytes
from skyctl.records.problem import Device, Problem, SyncRoutes
from skyctl.records.sync import Route, Sync

DEFAULT_CHUNK_BYTES: int = Sync.model_fields["chunk_bytes"].default
LEAST_EDGE_BYTES = 524288.0
"""Of an edge's messages, whatever their size, so much is kept room for."""
MEMORY_ROUNDING = 1e-12
SHORT_FROM_S = 4e-8
"""Seconds of a byte on the busiest line from which on messages are short."""


class Holder(NamedTuple):
    """A device that holds all layers, and what it computes of a step."""

    device: str
    microbatches: int
    recompute: bool


class CheckedRoute(NamedTuple):
    """A route's share of the bytes, and its edges in the direction in which they send."""

    share: float
    root: str
    up: tuple[tuple[str, str], ...]
    down: tuple[tuple[str, str], ...]


class StepTimes(NamedTuple):
    """Seconds of a step, of its exposed sync, and by holder of computing, optimizer included."""

    iteration_s: float
    sync_s: float
    compute_s: tuple[float, ...]


class DataStep:
    """One problem's layers, links and devices, as the contract's Data parallelism reads them."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.devices = {device.id: device for device in problem.devices}
        self.delayed = problem.rhythm.delay == 1
        self.format = FormatBytes(problem)
        together = problem.parallel == "data"
        self.sizes = self.format.late(0, len(problem.layers)) if together else self.format.both()
        self.links = {(x.source, x.target): x for x in problem.links}
        self.wires = Wires(problem)

    def allowed(self, device: str) -> bool:
        """Whether the pins let it hold the first layer and the last, and it is not named as a helper."""
        if device in (self.problem.helpers or ()):
            return False
        pins = (self.problem.first_stage, self.problem.last_stage)
        return all(device in pin for pin in pins if pin is not None)

    def layer_times(self, device: str, recompute: bool) -> tuple[list[float], list[float], float]:
        """(forward, backward with what is computed again, by layer; optimizer a step), in seconds."""
        times = self.problem.times.get(device)
        if times is None:
            rate = self.devices[device].flops_per_s
            forward = [x.flops / rate / 3 for x in self.problem.layers]
            backward = [x.flops / rate - f for x, f in zip(self.problem.layers, forward, strict=True)]
            optimizer_s = 0.0
        else:
            forward, backward = list(times.forward_s), list(times.backward_s)
            added_s = self.devices[device].reduce_byte_s * math.fsum(self.format.added)
            optimizer_s = math.fsum(times.optimizer_s) + added_s
        if recompute:
            backward = [f + b for f, b in zip(forward, backward, strict=True)]
        return forward, backward, optimizer_s

    def microbatch_s(self, device: str, recompute: bool) -> float:
        """Seconds of one microbatch on a holder, which has no neighbours."""
        forward, backward, _ = self.layer_times(device, recompute)
        entry = self.devices[device]
        return math.fsum([*forward, *backward, entry.handling_s, entry.action_s])

    def need_bytes(self, device: str, recompute: bool, children: int, chunk_bytes: int) -> float:
        """The contract's formula for one stage of all layers, one microbatch in flight, and its chunks."""
        layers = self.problem.layers
        kept = [x.activation_bytes for x in layers]
        once = [x.workspace_bytes for x in layers]
        if recompute:
            once = [x.activation_bytes + x.workspace_bytes for x in layers]
            kept[1:] = [min(x.activation_bytes, before.output_bytes) for before, x in pairwise(layers)]
        held = [self.devices[device].reserved_bytes, *(x.state_bytes for x in layers), *kept, max(once)]
        held += self.format.kept
        if self.problem.rhythm.is_stale:
            # a buffer for gradients; a server's weights, and a buffer for each other device
            held += self.sizes * (1 + (1 + children if children else 0))
        return math.fsum(held) + max(LEAST_EDGE_BYTES, 2.0 * chunk_bytes) * children

    def fits(self, device: str, need_bytes: float) -> bool:
        """Whether a device has that many bytes."""
        has = self.devices[device].memory_bytes
        return has is None or need_bytes <= has * (1 + MEMORY_ROUNDING)

    def helper_bytes(self, device: str, children: int, chunk_bytes: int) -> float:
        """What a device needs that only adds and passes on."""
        return self.devices[device].reserved_bytes + max(LEAST_EDGE_BYTES, 2.0 * chunk_bytes) * children

    def byte_s(self, trees: Sequence[CheckedRoute], holders: Collection[str]) -> float:
        """Seconds of one byte of gradient on what is busiest, over all trees.

        A link, a shared resource, or the processor of a device that is no holder.
        """
        sent: dict[tuple[str, str], float] = {}
        for tree in trees:
            for edge in (*tree.up, *tree.down):
                sent[edge] = sent.get(edge, 0.0) + tree.share
        busy = [n / self.links[edge].bandwidth_bytes_per_s for edge, n in sent.items() if edge in self.links]
        for resource in self.problem.shared:
            over = {(pair[0], pair[1]) for pair in resource.links}
            busy.append(
                math.fsum(n for edge, n in sent.items() if edge in over) / resource.bandwidth_bytes_per_s
            )
        helping = {device for edge in sent for device in edge} - set(holders)
        busy += [self.processor_byte_s(self.devices[device], trees) for device in helping]
        return max(busy, default=0.0)

    def latency_s(self, trees: Sequence[CheckedRoute]) -> float:
        """The longest way up to a tree's root and down from it, in seconds of latency."""
        return max(
            (self._depth_s(x.up, x.root, 0) + self._depth_s(x.down, x.root, 1) for x in trees), default=0.0
        )

    def _depth_s(self, edges: Iterable[tuple[str, str]], root: str, child: int) -> float:
        """``child``: which end of an edge is the farther one from the root."""
        latencies = {edge: self.format.passes * link.latency_s for edge, link in self.links.items()}
        return max(ways_from_root(edges, root, child, latencies).values())

    def fill_s(self, trees: Sequence[CheckedRoute], chunk_bytes: float, holders: Collection[str]) -> float:
        """Seconds beyond all bytes on what is busiest, as messages pass trees edge by edge."""
        total = math.fsum(self.sizes)
        work: dict[object, float] = {}
        head: dict[object, float] = {}
        tail: dict[object, float] = {}
        for tree in trees:
            message_bytes = min(chunk_bytes, tree.share * total)
            for edge, before_s, after_s in edge_waits(tree, self.wires.line_s):
                link_s = self.wires.link_s.get(edge, 0.0)
                used: list[tuple[object, float]] = [(edge, link_s)]
                used += [(k, self.wires.shared_s[k]) for k in self.wires.over.get(edge, ())]
                for device in {*edge} - set(holders):
                    adds = edge in tree.up and device == edge[1]
                    added_s = self.devices[device].reduce_byte_s if adds else 0.0
                    used.append((device, self.devices[device].message_byte_s + added_s))
                for what, byte_s in used:
                    work[what] = work.get(what, 0.0) + tree.share * byte_s * total
                    head[what] = min(before_s * message_bytes, head.get(what, math.inf))
                    tail[what] = min(after_s * message_bytes, tail.get(what, math.inf))
        most = max(work.values(), default=0.0)
        return self.format.passes * (max((work[x] + head[x] + tail[x] for x in work), default=0.0) - most)

    def sum_s(self, trees: Sequence[CheckedRoute], byte_s: float) -> float:
        """Seconds of all gradients on what is busiest, and of the way up and down, without filling."""
        return math.fsum(self.sizes) * byte_s + self.latency_s(trees)

    def message_factor(self, byte_s: float) -> float:
        """How often ``message_byte_s`` counts, if a byte takes so long or longer on the busiest line."""
        return 2.0 if self.delayed and byte_s >= SHORT_FROM_S else 1.0

    def processor_s(self, entry: Device, trees: Sequence[CheckedRoute], factor: float = 1.0) -> float:
        """Seconds of a device's processor for all gradients of a step."""
        return self.processor_byte_s(entry, trees, factor) * math.fsum(self.sizes)

    def processor_byte_s(self, entry: Device, trees: Sequence[CheckedRoute], factor: float = 1.0) -> float:
        """Seconds of a device's processor for a byte of gradient: adding, sending, receiving."""
        added = passed = 0.0
        for tree in trees:
            added += tree.share * sum(edge[1] == entry.id for edge in tree.up)
            passed += tree.share * sum(entry.id in edge for edge in (*tree.up, *tree.down))
        return entry.reduce_byte_s * added + factor * entry.message_byte_s * passed

    def play(
        self,
        holders: Sequence[Holder],
        trees: Sequence[CheckedRoute],
        chunk_bytes: float = DEFAULT_CHUNK_BYTES,
    ) -> StepTimes:
        """The step: holders compute, layers are summed from the last to the first, then all optimize."""
        names = {holder.device for holder in holders}
        byte_s = self.byte_s(trees, names)
        ends = [x.microbatches * self.microbatch_s(x.device, x.recompute) for x in holders]
        waits = [self.layer_times(x.device, x.recompute) for x in holders]
        if len(holders) == 1:
            step_s = ends[0] + waits[0][2]
            return StepTimes(step_s, 0.0, (step_s,))
        optimizers = [optimizer_s for _, _, optimizer_s in waits]
        if self.delayed:
            factor = self.message_factor(byte_s)
            busy = [self.processor_s(self.devices[x.device], trees, factor) for x in holders]
            steps = [math.fsum(parts) for parts in zip(ends, busy, optimizers, strict=True)]
            sum_s = self.sum_s(trees, byte_s) + self.fill_s(trees, chunk_bytes, names)
            return StepTimes(max(*steps, sum_s), max(0.0, sum_s - max(steps)), tuple(steps))
        # of layer k's gradients: when computing ends, less the backward of the layers before it
        ready = [end - math.fsum(backward[:-1]) for end, (_, backward, _) in zip(ends, waits, strict=True)]
        done_s = -math.inf
        for k in range(len(self.sizes) - 1, -1, -1):
            done_s = max(done_s, *ready) + self.sizes[k] * byte_s
            if k:
                ready = [
                    # the first layer's gradients are there when computing ends, whatever the sums' rounding
                    end if k == 1 else at + backward[k - 1]
                    for end, at, (_, backward, _) in zip(ends, ready, waits, strict=True)
                ]
        for holder, end in zip(holders, ends, strict=True):
            done_s = max(done_s, end + self.processor_s(self.devices[holder.device], trees))
        done_s += self.fill_s(trees, chunk_bytes, names) + self.latency_s(trees)
        compute_s = tuple(end + more for end, more in zip(ends, optimizers, strict=True))
        return StepTimes(done_s + max(optimizers), done_s - max(ends), compute_s)


def edge_waits(
    tree: CheckedRoute, byte_s: Callable[[tuple[str, str]], float]
) -> Iterator[tuple[tuple[str, str], float, float]]:
    """By edge, what a byte takes on the longest ways before and after it, over all holders that are ends.

    A way up begins, and a way down ends, with an edge that is left out.
    """
    up = [way[::-1] for way in _ways(tree.up, tree.root, 0)]
    down = _ways(tree.down, tree.root, 1)
    taken = {edge: byte_s(edge) for way in (*up, *down) for edge in way}

    def longest(ways: Iterable[Sequence[tuple[str, str]]]) -> float:
        return max((math.fsum(taken[edge] for edge in way) for way in ways), default=0.0)

    up_s, down_s = longest(way[1:] for way in up), longest(way[:-1] for way in down)
    for edge in tree.up:
        through = [(way, way.index(edge)) for way in up if edge in way]
        before_s = longest(way[1:at] for way, at in through)
        yield edge, before_s, longest([through[0][0][through[0][1] + 1 :]]) + down_s
    for edge in tree.down:
        through = [(way, way.index(edge)) for way in down if edge in way]
        after_s = longest(way[at + 1 : -1] for way, at in through)
        yield edge, up_s + longest([through[0][0][: through[0][1]]]), after_s


def _ways(edges: Sequence[tuple[str, str]], root: str, child: int) -> list[list[tuple[str, str]]]:
    """By device but the root, the edges between the root and it, the one at the root first."""
    way = {edge[child]: edge for edge in edges}
    found = []
    for edge in edges:
        passed = [edge]
        while passed[-1][1 - child] != root:
            passed.append(way[passed[-1][1 - child]])
        found.append(passed[::-1])
    return found


def ways_from_root(
    edges: Iterable[tuple[str, str]], root: str, child: int, latency_s: Mapping[tuple[str, str], float]
) -> dict[str, float]:
    """By device that a way between it and the root leads to, the way's seconds of latency.

    ``child``: which end of an edge is the farther one from the root.
    """
    after: dict[str, list[tuple[str, str]]] = {}
    for edge in edges:
        after.setdefault(edge[1 - child], []).append(edge)
    reached = {root: 0.0}
    waiting = [root]
    while waiting:
        at = waiting.pop()
        for edge in after.get(at, ()):
            if edge[child] not in reached:
                reached[edge[child]] = reached[at] + latency_s.get(edge, 0.0)
                waiting.append(edge[child])
    return reached


def children(trees: Sequence[CheckedRoute]) -> Mapping[str, int]:
    """By device, how many edges arrive at it with partial sums, over all trees."""
    out: dict[str, int] = {}
    for tree in trees:
        for _, parent in tree.up:
            out[parent] = out.get(parent, 0) + 1
    return out


def checked_routes(routes: Sequence[Route]) -> tuple[CheckedRoute, ...]:
    """A record's routes as trees."""
    return tuple(
        CheckedRoute(x.share, x.root, tuple((a, b) for a, b in x.up), tuple((a, b) for a, b in x.down))
        for x in routes
    )


def ring_and_stars(
    devices: Sequence[str], sync: SyncRoutes = "auto", helpers: Sequence[str] = ()
) -> Iterable[tuple[CheckedRoute, ...]]:
    """A ring in the devices' order, and a star at each device: those of them that ``sync`` asks for.

    ``helpers``: further roots of a star, with ``server``.
    """
    if sync not in ("star", "server"):
        yield _ring(devices)
    roots = () if sync == "ring" else (*devices, *helpers) if sync == "server" else devices
    for root in roots:
        others = [x for x in devices if x != root]
        yield (CheckedRoute(1.0, root, tuple((x, root) for x in others), tuple((root, x) for x in others)),)


def _ring(devices: Sequence[str]) -> tuple[CheckedRoute, ...]:
    count = len(devices)
    around = [tuple(devices[(i + j) % count] for j in range(count)) for i in range(count)]
    return tuple(
        CheckedRoute(
            1 / count,
            order[0],
            tuple(zip(order[1:], (*order[2:], order[0]), strict=True)),
            tuple(pairwise(order)),
        )
        for order in around
    )
