"""The least seconds of a step in which a device holds a range of layers in one of several pipelines.

A device holds layers [i, j) in a pipeline of m microbatches and of whichever other devices. It starts once
one microbatch has passed the layers before i, computes m times forward and backward, and then the last
gradient goes back through the layers before i, the device's own gradients are sent and received, and it
optimizes; with a delay the sending is a limit of its own, beside its computing. Of other devices the quickest
counts, layer by layer, and of lines the fastest; so no plan is below it. Sums go over rings and stars, where
each device sends a layer's bytes over one line whole.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from skyctl.planner.cost_model import CostModel
from skyctl.planner.link_tables import LinkTables
from skyctl.planner.summed_bytes import summed_bytes
from skyctl.records.problem import Problem

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

ROOM = 1e-11
"""Relative to a limit: a stage this little above it counts as within, for sums round."""


class StageCosts:
    """By device and range of layers, the least step = ``fixed_s`` + m · ``microbatch_s``, m up to ``most``.

    Ranges are numbered; devices that can't be told apart have one row.

    Attributes:
        starts, stops: by range, its first layer and the one after its last.
        sizes: by row, how many devices it stands for.
        fixed_s, microbatch_s: by row and range; ``fixed_s`` infinite where the range has no place there.
        overlapped_s: by row and range, with a delay what its sums take; no step is shorter.
        most: by row and range, microbatches that its memory allows, and of a step all but one.
    """

    def __init__(self, problem: Problem, links: LinkTables | None = None) -> None:
        self.model = CostModel(problem, links)
        self.problem = problem
        self.layers, self.microbatches = self.model.layers, problem.microbatches
        starts, stops = np.triu_indices(self.layers + 1, 1)
        self.starts: Ints = starts.astype(np.int64)
        self.stops: Ints = stops.astype(np.int64)
        lines = _Lines(self.model)
        rows: dict[bytes, list[Any]] = {}
        for device in range(self.model.devices):
            costs = self._costs_of(device, lines)
            key = b"".join(part.tobytes() for part in costs)
            rows.setdefault(key, [0, costs])[0] += 1
        self.sizes: Ints = np.array([size for size, _ in rows.values()], dtype=np.int64)
        self.fixed_s, self.microbatch_s, self.most, self.overlapped_s = (
            np.stack([costs[k] for _, costs in rows.values()]) for k in range(4)
        )

    def within(self, limit_s: float) -> Floats:
        """By row and range, how many microbatches of a step of at most so many seconds."""
        with np.errstate(divide="ignore", invalid="ignore"):
            left_s = limit_s * (1 + ROOM) - self.fixed_s
            counts = np.where(left_s < 0, 0.0, np.floor(left_s / self.microbatch_s))
        counts[np.isnan(counts)] = np.inf  # no time is left, and none is needed
        counts[self.overlapped_s > limit_s * (1 + ROOM)] = 0.0
        out: Floats = np.minimum(counts, self.most)
        return out

    def _costs_of(self, device: int, lines: _Lines) -> tuple[Floats, Floats, Floats, Floats]:
        model, entry = self.model, self.problem.devices[device]
        i, j = self.starts, self.stops
        work, backward, optimizer = (
            np.array(x[device]) for x in (model.work_s, model.backward_s, model.optimizer_s)
        )
        neighbours = (i > 0).astype(float) + (j < self.layers)
        microbatch_s = work[j] - work[i] + 2 * model.overhead_s[device] + entry.neighbour_s * neighbours
        ahead_s, back_s = lines.before_s(device)
        most = self._most(device)
        sent = lines.sent_bytes[j] - lines.sent_bytes[i]
        passed_s = 2 * entry.message_byte_s * sent
        own_s = optimizer[j] - optimizer[i]
        if self.problem.rhythm.delay:
            fixed_s = ahead_s[i] + np.maximum(back_s[i], own_s + passed_s)
            fixed_s[most < 1] = np.inf
            overlapped_s = np.maximum(*(self._summed_s(lines, device, way) for way in (0, 1)))
            return fixed_s, microbatch_s, most, overlapped_s
        exposed_s = np.maximum(*(self._exposed_s(backward, lines, device, way) for way in (0, 1)))
        after_s = np.maximum.reduce([back_s[i], exposed_s, passed_s])
        fixed_s = ahead_s[i] + after_s + lines.latency_s(device)
        fixed_s = fixed_s + np.maximum(own_s, lines.optimizer_s)
        fixed_s[most < 1] = np.inf
        return fixed_s, microbatch_s, most, np.zeros_like(fixed_s)

    def _summed_s(self, lines: _Lines, device: int, way: int) -> Floats:
        """By range, what its gradients take on the device's lines out or in: n layers' over n at most."""
        byte_s, sent = lines.byte_s(device, way), lines.sent_bytes
        many = (sent[self.stops] - sent[self.starts]) * byte_s[self.stops - self.starts - 1]
        single = _range_maximum(list(np.diff(sent)))[self.starts, self.stops] * byte_s[0]
        out: Floats = np.maximum(many, single + lines.latency_s(device))
        return out

    def _exposed_s(self, backward: Floats, lines: _Lines, device: int, way: int) -> Floats:
        """By range, what its gradients take after the device's last backward, on its lines out or in.

        Those of layers [i, l] are there no sooner than before the backward of the layers [i, l); each
        layer's go over one line whole, so n layers' over n lines at most.
        """
        byte_s = lines.byte_s(device, way)
        table = np.full((self.layers + 1, self.layers + 1), -np.inf)
        for i in range(self.layers):
            many = lines.sent_bytes[i + 1 :] - lines.sent_bytes[i]
            single = np.diff(lines.sent_bytes[i:]) * byte_s[0]
            spent_s = np.maximum(many * byte_s[: self.layers - i], single)
            table[i, i + 1 :] = np.maximum.accumulate(spent_s - (backward[i:-1] - backward[i]))
        out: Floats = table[self.starts, self.stops]
        return out

    def _most(self, device: int) -> Floats:
        """By range, the most microbatches that memory and pins allow; 0: none."""
        model, i, j = self.model, self.starts, self.stops
        most = np.full(len(i), float(self.microbatches - 1))
        room = model.available_bytes[device]
        if room < np.inf:
            need = np.array(model.state_bytes)[j] - np.array(model.state_bytes)[i]
            need += _range_maximum([x.workspace_bytes for x in self.problem.layers])[i, j]
            output = np.array([0.0, *model.output_bytes])
            output[-1] = 0.0
            need += model.receive_window * (output[i] + output[j])
            each = np.array(model.activation_bytes)[j] - np.array(model.activation_bytes)[i]
            followed = model.schedule != "sequential"
            most[(need + each > room)] = 0
            alone = (most > 0) & (j < self.layers) & (need + 2 * each > room) & followed
            most[alone] = np.minimum(most[alone], 1.0)
        if device not in model.may_be_first:
            most[i == 0] = 0
        if device not in model.may_be_last:
            most[j == self.layers] = 0
        for tie in self.problem.ties:
            held = np.array([((i <= at) & (at < j)) for at in tie.layers]).sum(axis=0)
            most[(held > 0) & (held < len(tie.layers))] = 0
        return most


def _range_maximum(values: list[float]) -> Floats:
    """[i, j] → the largest of values [i, j), 0 where there are none."""
    count = len(values)
    out = np.zeros((count + 1, count + 1))
    for i in range(count):
        out[i, i + 1 :] = np.maximum.accumulate(values[i:])
    return out


class _Lines:
    """Lower bounds on the times of other devices and of the links to them, for each device."""

    def __init__(self, model: CostModel) -> None:
        problem, count = model.problem, model.devices
        self.model = model
        self.ends = np.arange(count)
        sizes = [size.first + size.second for size in summed_bytes(problem)]
        self.sent_bytes = np.concatenate([[0.0], np.cumsum(sizes)])
        self._message_s, self._latency_s = model.links.message_line_s, model.links.latency_s
        self._line_s, self._slots = model.links.line_s, model.links.slots
        self._forward_s, self._backward_s, optimizer = (
            np.stack([np.diff(sums[d]) for d in range(count)])
            for sums in (model.forward_s, model.backward_s, model.optimizer_s)
        )
        self.optimizer_s = float(optimizer.min(axis=0).max())
        """Of every plan's slowest optimizer: each layer has one somewhere."""
        self._overhead_s = np.array(model.overhead_s) + np.array(model.neighbour_overhead_s)

    def _others(self, device: int) -> Ints:
        return np.flatnonzero(self.ends != device)

    def before_s(self, device: int) -> tuple[Floats, Floats]:
        """By boundary, seconds until a first microbatch arrives there at least, and from there to the end."""
        others = self._others(device)
        sizes = np.array([0.0, *self.model.output_bytes])
        out = []
        for layers_s, ends in (
            (self._forward_s, (others, device)),
            (self._backward_s, (device, others)),
        ):
            passed_s = np.concatenate([[0.0], np.cumsum(layers_s[others].min(axis=0))])
            messages_s = np.outer(sizes, self._message_s[ends]) + self._latency_s[ends]
            passed_s[1:] += messages_s.min(axis=1)[1:] + self._overhead_s[others].min()
            out.append(passed_s)
        return out[0], out[1]

    def latency_s(self, device: int) -> float:
        """Of its gradients' way to another device, and of the sum's way back."""
        others = self._others(device)
        return float(self._latency_s[device, others].min() + self._latency_s[others, device].min())

    def byte_s(self, device: int, way: int) -> Floats:
        """Seconds of a byte over 1, 2, … of its lines at once (as many as layers), out (0) or in (1)."""
        others = self._others(device)
        count = len(self.ends)
        pairs = device * count + others if way == 0 else others * count + device
        with np.errstate(divide="ignore"):
            rates = 1 / self._line_s.take(pairs)
        caps = _fastest(rates, self.model.layers)
        for number, rate in self._slots.rates_of(pairs).items():
            over = self._slots.occupies(pairs, number)
            caps = np.minimum(caps, rate + _fastest(rates[~over], self.model.layers))
        return 1 / caps


def _fastest(rates: Floats, most: int) -> Floats:
    """The sum of the 1, 2, … ``most`` largest of these."""
    out = np.zeros(most)
    count = min(most, len(rates))
    out[:count] = np.cumsum(np.sort(rates)[::-1][:count])
    out[count:] = out[count - 1] if count else 0.0
    return out
