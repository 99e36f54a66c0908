"""Evaluates the layers' prices that a hybrid's certificate brings along; nothing is searched or trusted.

Every layer has a price, none negative. Let u of a device be the most that m · (the prices of layers [i, j))
can be, over all i, j and m with which it could be part of a step below the limit: a microbatch's way to it
and on from it to the end, its own computing, its gradients' way out and in, and its optimizer, each no longer
than it takes at least; with a delay its gradients' way is a limit by itself, beside the rest. A plan of two
pipelines or more takes M · Σ prices in all, on devices that are used once. If Σ u is less, no such plan is
below the limit, whatever the prices. Sums go over rings or stars.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from skyctl.planner.verification.problem_data import Array, Ints, Proof, sums
from skyctl.planner.verification.step import CheckedStep
from skyctl.schedule.actions import least_in_flight

ROUNDING = 1e-11
"""Relative to all prices: how far Σ u must stay below, and to the limit: how far above it still counts."""


def prove_by_prices(step: CheckedStep, below_s: float, prices: Sequence[float]) -> Proof:
    """Whether the prices prove that no two pipelines or more have a step below ``below_s`` seconds."""
    worth = np.array(prices, dtype=float)
    if len(worth) != step.facts.layers:
        return Proof(None, f"the witness prices {len(worth)} layers, the problem has {step.facts.layers}")
    total = float(worth.sum())
    if worth.min() < 0 or not 0 < total < math.inf:
        return Proof(None, "a hybrid's layers have prices of 0 at least, some above it")
    if len(step.ids) < 2 or step.problem.microbatches < 2:
        return Proof(True, "one device, or one microbatch, makes no two pipelines")
    limit = _StageLimit(step, below_s)
    worth = sums(worth / total)
    taken = math.fsum(limit.most(device, worth) for device in range(len(step.ids)))
    wanted = step.problem.microbatches
    if taken < wanted * (1 - ROUNDING):
        return Proof(True, f"below it, all devices take at most {taken / wanted:.6%} of the work, by prices")
    return Proof(None, f"by its prices the devices may take {taken / wanted:.4%} of the work below it")


class _LineTables:
    """A problem's lines as tables by source and target: entries by pair take too long for many devices."""

    def __init__(self, step: CheckedStep) -> None:
        wires, at, count = step.sums.wires, step.index, len(step.ids)
        self.latency_s, self.line_s, self.message_s, self.message_latency_s = np.zeros((4, count, count))
        self.over: list[Ints] = []
        """By pair, its first, second, … shared resource; −1 where it has no further one."""
        self.shared_s = wires.shared_s
        sent = np.ones((count, count))
        for (a, b), link in step.links.items():
            pair = at[a], at[b]
            self.message_latency_s[pair], sent[pair] = link.latency_s, link.sent_share
            self.latency_s[pair], self.line_s[pair] = wires.latency_s[a, b], wires.link_s[a, b]
        for (a, b), numbers in wires.over.items():
            for slot, number in enumerate(numbers):
                if slot == len(self.over):
                    self.over.append(np.full((count, count), -1))
                self.over[slot][at[a], at[b]] = number
                self.line_s[at[a], at[b]] = max(self.line_s[at[a], at[b]], wires.shared_s[number])
        self.message_s = sent * self.line_s

    def others(self, device: int) -> Ints:
        """The numbers of all devices but this one."""
        return np.delete(np.arange(len(self.line_s)), device)

    def byte_s(self, device: int, out: bool, most: int) -> Array:
        """Seconds of a byte cut among its 1, 2, … ``most`` fastest lines, no further than resources allow."""
        others = self.others(device)
        ends = (device, others) if out else (others, device)
        with np.errstate(divide="ignore"):
            rates = 1 / self.line_s[ends]
        caps = [_fastest(rates, most)]
        numbers = [slot[ends] for slot in self.over]
        for number in {x for slot in numbers for x in slot.tolist()} - {-1}:
            apart = np.all([slot != number for slot in numbers], axis=0)
            caps.append(1 / self.shared_s[number] + _fastest(rates[apart], most))
        out_s: Array = 1 / np.min(caps, axis=0)
        return out_s


def _fastest(rates: Array, most: int) -> Array:
    """The sums of the 1, 2, … ``most`` largest of these; of all, where there are fewer."""
    out = np.zeros(most)
    largest = np.cumsum(np.sort(rates)[::-1][:most])
    out[: len(largest)] = largest
    if len(largest):
        out[len(largest) :] = largest[-1]
    return out


class _StageLimit:
    """The most that a device can take of a step below a limit, as a part of one of several pipelines."""

    def __init__(self, step: CheckedStep, below_s: float) -> None:
        self.step = step
        self.below_s = below_s * (1 + ROUNDING) if below_s < math.inf else math.inf
        self.count = step.facts.layers
        self.sent = sums(np.array(step.sums.sizes))
        self.columns = [step.facts.columns(d) for d in range(len(step.ids))]
        self.lines = _LineTables(step)
        self._optimizer_s = float(np.stack([x[2] for x in self.columns]).min(axis=0).max())

    def most(self, device: int, worth: Array) -> float:
        """The most that it can take, in prices; ``worth``: prefix sums of the prices."""
        forward, backward, optimizer = (sums(x) for x in self.columns[device])
        ahead_s, back_s = self._passage_s(device)
        entry = self.step.problem.devices[device]
        wait_s = self._latency_s(device)
        lines = [self.lines.byte_s(device, out, self.count) for out in (True, False)]
        best = 0.0
        for i in range(self.count):
            stops: Ints = np.arange(i + 1, self.count + 1, dtype=np.int64)
            exposed_s = np.zeros(len(stops))
            for byte_s in lines:
                spent_s = np.maximum(
                    (self.sent[stops] - self.sent[i]) * byte_s[: len(stops)],
                    (self.sent[stops] - self.sent[stops - 1]) * byte_s[0],
                )
                left_s = spent_s - (backward[stops - 1] - backward[i])
                exposed_s = np.maximum(exposed_s, np.maximum.accumulate(left_s))
            passed_s = 2 * entry.message_byte_s * (self.sent[stops] - self.sent[i])
            after_s = np.maximum(np.maximum(exposed_s, passed_s), back_s[i]) + wait_s
            own_s = optimizer[stops] - optimizer[i]
            last_s = np.maximum(own_s, self._optimizer_s)
            if self.step.sums.delayed:
                after_s, last_s = np.maximum(passed_s + own_s, back_s[i]), np.zeros(len(stops))
            each_s = forward[stops] - forward[i] + backward[stops] - backward[i]
            each_s = each_s + 2 * self.step.facts.overhead_table(device)[i, stops]
            left_s = self.below_s - (ahead_s[i] + after_s + last_s)
            with np.errstate(divide="ignore", invalid="ignore"):
                counts = np.where(each_s > 0, np.floor(left_s / each_s), np.inf)
            counts = np.where(left_s < 0, 0.0, np.minimum(counts, self._allowed(device, i, stops)))
            if self.step.sums.delayed:
                counts[self._sums_s(lines, i, wait_s) > self.below_s] = 0.0
            best = max(best, float((counts * (worth[stops] - worth[i])).max()))
        return best

    def _sums_s(self, lines: Sequence[Array], start: int, wait_s: float) -> Array:
        """By stop, how long its gradients are on its way out or in, beside whatever it computes."""
        sizes = np.diff(self.sent[start:])
        largest = np.maximum.accumulate(sizes)
        out = np.zeros(len(sizes))
        for byte_s in lines:
            spread_s = np.cumsum(sizes) * byte_s[: len(sizes)]
            out = np.maximum(out, np.maximum(spread_s, largest * byte_s[0] + wait_s))
        return out

    def _passage_s(self, device: int) -> tuple[Array, Array]:
        """By first layer, what a microbatch takes at least to the device, and on from there to the end."""
        others = self.lines.others(device)
        entries = [self.step.problem.devices[d] for d in others]
        beside_s = min((x.handling_s + x.action_s) / 2 + x.neighbour_s / 2 for x in entries)
        sizes = np.array([layer.output_bytes for layer in self.step.problem.layers[:-1]])
        out = []
        for column, ends in ((0, (others, device)), (1, (device, others))):
            layers_s = np.stack([self.columns[d][column] for d in others]).min(axis=0)
            hops_s = np.outer(sizes, self.lines.message_s[ends]) + self.lines.message_latency_s[ends]
            passed_s = sums(layers_s)[:-1]
            passed_s[1:] += beside_s + hops_s.min(axis=1)
            out.append(passed_s)
        return out[0], out[1]

    def _latency_s(self, device: int) -> float:
        """Of its nearest way to another device, and of the nearest way from one."""
        others, latency_s = self.lines.others(device), self.lines.latency_s
        return float(latency_s[device, others].min() + latency_s[others, device].min())

    def _allowed(self, device: int, start: int, stops: Ints) -> Array:
        """By stop, the most microbatches that memory, pins and ties let it have there."""
        facts, most = self.step.facts, self.step.problem.microbatches - 1
        out = np.full(len(stops), float(most))
        room = facts.room[device]
        if room < math.inf:
            peak = np.maximum.accumulate(facts.workspace[start:])
            alone = least_in_flight(self.step.problem.schedule, 0, 1, most)
            before = least_in_flight(self.step.problem.schedule, 0, 2, most)
            for in_flight, count in ((before, 1.0), (alone, 0.0)):
                need = facts.fixed_bytes(start, stops, in_flight) + peak
                out[need > room] = count
                if count:  # the last stage has one microbatch in flight, however many there are
                    out[-1] = most
        if start == 0 and not facts.may_be_first(device):
            out[:] = 0
        if not facts.may_be_last(device):
            out[-1] = 0
        for k, stop in enumerate(stops.tolist()):
            if self.step.splits_tie(start, stop):
                out[k] = 0
        return out
