"""A lower bound on data-parallel steps, proved for ``verify``: one inequality, else every set of replicas.

Each question is whether a plan takes less than a limit, and is answered by counting how many microbatches
every device has the time for below it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from skyctl.planner.verification.problem_data import Proof
from skyctl.planner.verification.reading import DEFAULT_CHUNK_BYTES, HeldRange
from skyctl.planner.verification.ring_orders import MOST_ORDERED, fastest_rings, least_of_rings
from skyctl.planner.verification.routes import Trees, children, ring, stars
from skyctl.planner.verification.step import CheckedStep
from skyctl.planner.verification.verdict import TOLERANCE

MOST_SETS = 5_000
"""Sets of replicas that are gone through one by one, at most."""


def prove_data(
    step: CheckedStep, bound_s: float, byte_s: Mapping[frozenset[str], float] | None = None
) -> Proof:
    """Whether no replicas, over any routes that the problem's ``sync`` leaves, have a step below ``bound_s``.

    Args:
        byte_s: by set of replicas, seconds of a byte that are proved of all routes among them.
    """
    search = _Limit(step, bound_s * (1 - TOLERANCE))
    if search.below_s <= 0:
        return Proof(True, "nothing is below zero")
    if (alone := search.fast_alone()) is not None:
        return Proof(False, f"{alone} alone is faster")
    lines = "fastest lines" if search.one_line else "lines"
    if search.too_few(search.usable):
        return Proof(True, f"all devices together compute too little below it, sums over their {lines}")
    most = min(len(search.usable), step.problem.microbatches)
    if sum(math.comb(len(search.usable), size) for size in range(2, most + 1)) > MOST_SETS:
        return Proof(None, f"their {lines} alone do not rule it out, and there are too many sets")
    for size in range(2, most + 1):
        for chosen in combinations(search.usable, size):
            if search.too_few(chosen):
                continue
            if any(search.is_faster(chosen, trees) for trees in search.rings_and_stars(chosen)):
                return Proof(False, f"{', '.join(chosen)} are faster")
            if search.may_have_faster_ring(chosen):
                return Proof(None, f"{', '.join(chosen)} have too many rings to look at")
            priced_s = (byte_s or {}).get(frozenset(chosen), 0.0)
            if not search.one_line and not search.is_ruled_out(chosen, priced_s):
                return Proof(False, f"nothing rules out that {', '.join(chosen)} are faster over some routes")
    if search.one_line:
        return Proof(True, f"no set of holders has a {step.problem.sync} that is faster")
    return Proof(True, "no set of holders has routes that are faster, by its lines or its prices")


class _Limit:
    """The work that devices can do in less than ``below_s`` seconds.

    ``usable``: those that the pins and their memory let hold all layers.
    ``one_line``: every byte that a device sends goes over one of its lines, as in a ring or a star.
    """

    def __init__(self, step: CheckedStep, below_s: float) -> None:
        self.step, self.sums = step, step.sums
        self.below_s = below_s
        # the second pass of all layers comes with the first layer's gradients
        self._sent = step.sums.format.late(0, step.facts.layers)
        self._bytes = math.fsum(step.sums.sizes)
        self._held: dict[tuple[str, bool], HeldRange] = {}
        self._each_s: dict[HeldRange, float] = {}
        self.one_line = step.problem.sync in ("ring", "star", "server")
        ids = [device.id for device in step.problem.devices]
        self.usable = [x for x in ids if self._may_hold(x) and self._recompute(x, 0) is not None]
        self._least = {x: self._least_extra_s(x) for x in self.usable}

    def _may_hold(self, device: str) -> bool:
        """Whether the pins let it hold the first layer and the last, and it is not named as a helper."""
        facts, number = self.step.facts, self.step.index[device]
        pinned = facts.may_be_first(number) and facts.may_be_last(number)
        return pinned and device not in (self.step.problem.helpers or ())

    def _whole(self, device: str, recompute: bool) -> HeldRange:
        """All layers, on that device."""
        key = (device, recompute)
        if key not in self._held:
            number, layers = self.step.index[device], self.step.facts.layers
            self._held[key] = HeldRange(number, 0, layers, 1, 1, recompute=recompute)
        return self._held[key]

    def _optimizer_s(self, device: str) -> float:
        return self.step.optimizer_s(self._whole(device, False))

    def _microbatch_s(self, device: str, recompute: bool) -> float:
        held = self._whole(device, recompute)
        if held not in self._each_s:
            self._each_s[held] = self.step.computes_s(held)
        return self._each_s[held]

    def _recompute(self, device: str, arriving: int) -> bool | None:
        """Whether a replica must recompute; None: it does not fit in any way."""
        ways = (False, True) if self.step.problem.recompute else (False,)
        for recompute in ways:
            need = self.step.held_bytes(self._whole(device, recompute), arriving, DEFAULT_CHUNK_BYTES)
            if self.step.fits(device, need):
                return recompute
        return None

    def fast_alone(self) -> str | None:
        """A device whose step alone is below the limit."""
        m = self.step.problem.microbatches
        for device in self.usable:
            recompute = bool(self._recompute(device, 0))
            optimizer_s = self._optimizer_s(device)
            if m * self._microbatch_s(device, recompute) + optimizer_s < self.below_s:
                return device
        return None

    def _least_extra_s(self, device: str) -> float:
        """The least seconds of its step, as one of several replicas, that are not of its microbatches."""
        others = [x for x in self.usable if x != device]
        others += [x for x in self.sums.wires.may_help if others and x != device and x not in others]
        recompute = bool(self._recompute(device, 0))
        out, back = [(device, x) for x in others], [(x, device) for x in others]
        if not others:
            return math.inf
        wires = self.sums.wires
        if self.one_line:
            byte_s = max(min(map(wires.line_s, out)), min(map(wires.line_s, back)))
        else:
            byte_s = max(wires.least_s(out), wires.least_s(back))
        latency_s = sum(min(wires.latency_s.get(edge, 0.0) for edge in edges) for edges in (out, back))
        optimizer_s = self._optimizer_s(device)
        if self.sums.delayed:
            summed_s = byte_s * self._bytes + latency_s
            busy_s = self.sums.message_factor(byte_s) * self._passed_s(device)
            return math.inf if summed_s >= self.below_s else busy_s + optimizer_s
        return self._busy_s(device, recompute, byte_s) + latency_s + optimizer_s

    def _busy_s(self, device: str, recompute: bool, byte_s: float) -> float:
        """The least seconds of its gradients after its computing: on lines, or on its processor."""
        return max(self._exposed_s(device, recompute, byte_s), self._passed_s(device))

    def _passed_s(self, device: str) -> float:
        """Of its processor: every byte is sent and received once."""
        return 2 * self.step.devices[device].message_byte_s * self._bytes

    def is_ruled_out(self, devices: Sequence[str], priced_s: float) -> bool:
        """Whether just these can't have a step below the limit over any routes.

        ``priced_s``: seconds of a byte that are proved of all routes among them.
        """
        wires = self.sums.wires
        return self._are_too_slow(
            devices, max(priced_s, wires.cut_s(devices)), wires.least_latency_s(devices)
        )

    def _are_too_slow(self, devices: Sequence[str], byte_s: float, latency_s: float) -> bool:
        """Whether just these can't have a step below the limit if sums take so long, or longer.

        Args:
            byte_s: seconds of a byte on the busiest line.
            latency_s: of the longest way up to a root and down from it.
        """
        ways = {x: bool(self._recompute(x, 0)) for x in devices}
        if self.sums.delayed:
            if byte_s * self._bytes + latency_s >= self.below_s:
                return True
            factor = self.sums.message_factor(byte_s)
            extras = {x: factor * self._passed_s(x) + self._optimizer_s(x) for x in devices}
            counts = [self._counted(x, ways[x], extras[x]) for x in devices]
            return min(counts) < 1 or sum(counts) < self.step.problem.microbatches
        after_s = latency_s + max(self._optimizer_s(x) for x in devices)
        counts = [self._counted(x, ways[x], self._busy_s(x, ways[x], byte_s) + after_s) for x in devices]
        return min(counts) < 1 or sum(counts) < self.step.problem.microbatches

    def _exposed_s(self, device: str, recompute: bool, byte_s: float) -> float:
        """From the end of its computing to the end of all sums, if nobody has its gradients later."""
        backward = self.step.backward_s(self._whole(device, recompute))
        done_s = -math.inf
        at_s = -math.fsum(backward[:-1])
        for k in range(len(backward) - 1, -1, -1):
            done_s = max(done_s, at_s if k else 0.0) + self._sent[k] * byte_s
            at_s += backward[k - 1] if k else 0.0
        return done_s

    def _counted(self, device: str, recompute: bool, extra_s: float) -> float:
        """How many microbatches it can compute below the limit, with so many seconds besides."""
        left_s, each_s = self.below_s - extra_s, self._microbatch_s(device, recompute)
        if left_s < 0 or math.isnan(left_s):
            return -math.inf
        return math.floor(min(left_s / each_s, 1e15)) if each_s > 0 else math.inf

    def too_few(self, devices: Sequence[str]) -> bool:
        """Whether these together can't compute a step's microbatches, each with its least extras."""
        counts = (self._counted(x, bool(self._recompute(x, 0)), self._least[x]) for x in devices)
        return sum(max(0.0, count) for count in counts) < self.step.problem.microbatches

    def rings_and_stars(self, devices: Sequence[str]) -> Iterator[Trees]:
        """The routes that these may sum over without packed trees: the fastest rings of few, and stars."""
        sync, wires = self.step.problem.sync, self.sums.wires
        if sync not in ("star", "server"):
            yield from (ring(order) for order in fastest_rings(wires, devices) or [tuple(devices)])
        yield from stars(devices, sync, wires.helpers(devices))

    def may_have_faster_ring(self, devices: Sequence[str]) -> bool:
        """Whether a ring that is not looked at might be faster, where nothing but a ring is asked for."""
        if self.step.problem.sync != "ring" or len(devices) <= MOST_ORDERED:
            return False
        return not self._are_too_slow(devices, *least_of_rings(self.sums.wires, devices))

    def is_faster(self, devices: Sequence[str], trees: Trees) -> bool:
        """Whether just these, summing over these trees, have a step below the limit."""
        arriving = children(trees)
        ways = {x: self._recompute(x, arriving.get(x, 0)) for x in devices}
        if any(recompute is None for recompute in ways.values()):
            return False
        for x in {tree.root for tree in trees} - set(devices):
            need = self.step.helper_bytes(x, arriving.get(x, 0), DEFAULT_CHUNK_BYTES)
            if not self.step.fits(x, need):
                return False
        byte_s = self.sums.byte_s(trees, devices)
        if self.sums.delayed and self._bytes * byte_s + self.sums.latency_s(trees) >= self.below_s:
            return False
        after_s = self.sums.latency_s(trees) + max(map(self._optimizer_s, ways))
        total = 0.0
        for device, recompute in ways.items():
            exposed_s = self._exposed_s(device, bool(recompute), byte_s)
            busy_s = self._bytes * self.sums.processor_byte_s(self.step.devices[device], trees)
            extra_s = max(exposed_s, busy_s) + after_s
            if self.sums.delayed:
                entry, factor = self.step.devices[device], self.sums.message_factor(byte_s)
                extra_s = self._bytes * self.sums.processor_byte_s(entry, trees, factor)
                extra_s += self._optimizer_s(device)
            count = self._counted(device, bool(recompute), extra_s)
            if count < 1:
                return False
            total += count
        return total >= self.step.problem.microbatches
