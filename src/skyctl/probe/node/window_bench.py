"""One window of layers at a time on one device: its layers, their backwards in two parts, their optimizers.

A few layers are built at a time (``layer_windows``), and run as ``repetitions`` has it. Gradients
accumulate over repetitions as they do over microbatches. A layer that finds no memory is left out, with the
reason.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import nn

from skyctl.probe.node.call_overhead import CallOverhead, choose_window
from skyctl.probe.node.layer_windows import LayerWindow, choose_windows, single_layer_windows
from skyctl.probe.node.probe_requests import DistinctLayer
from skyctl.probe.node.repetition_timer import RepetitionTimer, collect_samples
from skyctl.probe.node.repetitions import (
    ChainRepetition,
    OptimizerRepetition,
    measure_split_backward,
)
from skyctl.probe.node.samples import LayerSamples, SplitSamples, block_sizes, estimate
from skyctl.workload.workload import Workload

UPDATE_CALL = -1
"""In the place of a layer's index: an optimizer's step over next to nothing."""

OPTIMIZER_SHARE = 0.25
"""An optimizer's slice, as part of a layer's: it runs once a step."""

ENOUGH_SPLITS, ENOUGH_UPDATES = 4, 100
"""So many repetitions of a backward in two parts, and of an optimizer's step; later passes leave them out.
While what is measured counts, one is enough."""


@dataclass(frozen=True)
class LayerBudget:
    """Seconds for one layer: in the company of others, by itself, and the warm-up before what counts."""

    window_s: float
    whole_s: float
    warm_up_s: float


@dataclass(frozen=True)
class BuiltWindow:
    """A window's layers in memory, and how they are run together at ``size`` samples."""

    window: LayerWindow
    size: int
    modules: Sequence[nn.Module]
    chain: ChainRepetition


class WindowBench:
    """Measures windows of layers on one device, into ``layer_samples``.

    ``counting``: whether only the layers as a whole are measured. ``over``: asked again and again; once it is
    true, whatever is being measured ends.

    Args:
        memory_bytes: what the device has for layers; one that needs more is skipped. None: try all.
        quota: ``cpus`` and ``period_s`` of the cgroup's quota, or None.
    """

    def __init__(
        self,
        workload: Workload,
        device: str,
        *,
        threads: int,
        slowdown: float,
        memory_bytes: float | None,
        quota: dict[str, float] | None,
    ) -> None:
        self._workload = workload
        self._device = device
        self._threads = threads
        self._memory_bytes = memory_bytes
        self.quota = quota
        self.timer = RepetitionTimer(
            device,
            slowdown,
            single_thread=threads == 1,
            quota_cpus=quota["cpus"] if quota else None,
            period_s=quota["period_s"] if quota else 0.0,
        )
        self.layer_samples = LayerSamples()
        self.counting = False
        self.over: Callable[[], bool] = lambda: False
        self._alone: set[int] = set()
        """Positions of layers that found no memory in company."""
        self._built: BuiltWindow | None = None
        """The window measured last: its next pass needs neither layers nor a warm-up."""

    def use_wall_clock(self) -> None:
        """Goes by the wall's clock from now on; what was measured by the CPU's is forgotten."""
        self.timer.by_wall = True
        self._built = None  # its marks go by the clock of before
        self.layer_samples = LayerSamples(skipped=self.layer_samples.skipped)

    def rounds(
        self, layers: Sequence[DistinctLayer], kinds: Mapping[int, Sequence[int]] | None
    ) -> list[tuple[int, LayerWindow, list[int]]]:
        """(microbatch size, window, positions of layers timed in it for the first time) for one pass."""
        rounds = []
        for size in sorted({size for layer in layers for size in layer.needs_bytes}):
            wanted = [
                (number, layer.index)
                for number, layer in enumerate(layers)
                if size in layer.needs_bytes and size not in layer.known_sizes and self._fits(layer, size)
            ]
            placed = [LayerWindow((index,), (number,)) for number, index in wanted]
            if kinds is not None and self.timer.on_cpu:
                needs = [layer.needs_bytes.get(size, math.inf) for layer in layers]
                room_bytes = math.inf if self._memory_bytes is None else self._memory_bytes
                placed = choose_windows(kinds[size], wanted, needs, self._alone, room_bytes)
            left = {number for number, _ in wanted}
            for window in placed:
                timed = sorted(left & set(window.kinds))
                left -= set(timed)
                rounds.append((size, window, timed))
        return rounds

    def measure(
        self,
        layers: Sequence[DistinctLayer],
        window: LayerWindow,
        size: int,
        timed: Sequence[int],
        budget: LayerBudget,
        updated: set[int],
    ) -> None:
        """Measures a window at one size: all its layers together, then singly those at positions ``timed``.

        Singly means the backward in two parts, and the optimizer.

        Args:
            updated: positions whose optimizer was measured in this pass; they are added.
        """
        doing = "while the layer was built"
        try:
            built = self._built
            fresh = built is None or (built.window, built.size) != (window, size)
            if built is None or fresh:
                self._built = built = None  # its memory is needed
                modules = self._build(window)
                chain = self._steps(modules, window.layers, size, window.in_flight)
                self._built = built = BuiltWindow(window, size, modules, chain)
            doing = f"at {size} samples"
            self._measure_chain(layers, built, budget, len(timed), warm=not fresh)
            for number in timed:
                at = window.kinds.index(number)
                index, module = layers[number].index, built.modules[at]
                hurried = self.counting or self.over()
                splits, updates = (1, 1) if hurried else (ENOUGH_SPLITS, ENOUGH_UPDATES)
                if len(self.layer_samples.split_samples(index, size)) < splits:
                    self._measure_split(layers[number], module, window.layers[at], size, budget.whole_s)
                if number not in updated and len(self.layer_samples.samples_of((index, 0))) < updates:
                    updated.add(number)
                    built.chain.drop_in_flight()
                    self._measure_optimizer(layers[number].index, module, budget.whole_s * OPTIMIZER_SHARE)
        except (RuntimeError, MemoryError) as exc:
            if not _is_out_of_memory(exc):
                raise
            self._built = built = None  # its memory is needed
            if len(window.kinds) == 1:
                self._alone.update(window.kinds)
                self._skip(layers[window.kinds[0]], [size], f"out of memory {doing}: {_first_line(exc)}")
                return
            self._alone.update(window.kinds)
            for single in single_layer_windows(window):
                if single.kinds[0] in timed:
                    self.measure(layers, single, size, single.kinds, budget, updated)

    def forget_window(self) -> None:
        """Frees the window measured last."""
        self._built = None

    def _build(self, window: LayerWindow) -> Sequence[nn.Module]:
        modules = [self._workload.build(index, index + 1, self._device)[0] for index in window.layers]
        for module in modules:
            module.train()
        return modules

    def _measure_chain(
        self,
        layers: Sequence[DistinctLayer],
        built: BuiltWindow,
        budget: LayerBudget,
        count: int,
        *,
        warm: bool,
    ) -> None:
        built.chain.shares.clear()
        samples = collect_samples(
            self.timer,
            built.chain,
            slice_s=budget.window_s * count,
            warm_up_s=budget.warm_up_s,
            warm_up_repeats=0 if warm else 1,
            least=1,  # later passes add more
            over=self.over,
        )
        shares = built.chain.shares[-len(samples) :]
        blocks = block_sizes(samples, self.timer.by_cpu)
        for at, number in enumerate(built.window.kinds):
            parts = [
                sample.with_shares(forward[at], backward[at])
                for sample, (forward, backward) in zip(samples, shares, strict=True)
            ]
            self.layer_samples.add((layers[number].index, built.size), parts, blocks, samples)

    def _steps(
        self, modules: Sequence[nn.Module], layers: Sequence[int], size: int, in_flight: int = 1
    ) -> ChainRepetition:
        by_cpu = self.timer.by_cpu and (self._threads == 1 or self.quota is not None)
        clock = time.process_time if by_cpu else time.perf_counter
        return ChainRepetition(
            self._workload, modules, layers, size, self._device, in_flight=in_flight, clock=clock
        )

    def _measure_split(
        self, layer: DistinctLayer, module: nn.Module, index: int, size: int, slice_s: float
    ) -> None:
        """A layer that has no room for this is not left out: its weight-gradient share stays unknown."""
        split_samples = SplitSamples()
        try:
            measure_split_backward(
                self.timer, self._steps([module], [index], size), self._device, slice_s, split_samples
            )
        except (RuntimeError, MemoryError) as exc:
            if not _is_out_of_memory(exc):
                raise
        else:
            kept = self.layer_samples.splits.setdefault((layer.index, size), SplitSamples())
            kept.whole += split_samples.whole
            kept.split += split_samples.split

    def measure_update_call(self, slice_s: float) -> None:
        """Measures what an optimizer's step takes whatever its parameters: one over a single number."""
        self._measure_optimizer(UPDATE_CALL, nn.Linear(1, 1, bias=False, device=self._device), slice_s)

    def _measure_optimizer(self, index: int, module: nn.Module, slice_s: float) -> None:
        parameters = list(module.parameters())
        if not parameters:
            return
        for parameter in parameters:
            if parameter.requires_grad:  # weights stay what they are, for the layer is run again
                parameter.grad = torch.zeros_like(parameter)
        steps = OptimizerRepetition(self._workload, module, self._device)
        samples = collect_samples(self.timer, steps, slice_s=slice_s)
        self.layer_samples.add((index, 0), samples, block_sizes(samples, self.timer.by_cpu))

    def update_call_s(self, wall_cpu_ratio: float | None) -> tuple[float, float]:
        """(seconds of such a step, the share of it that falls to each layer): a stage makes one for all."""
        samples = self.layer_samples.samples_of((UPDATE_CALL, 0))
        updated = sum(
            any(p.requires_grad for p in layer.parameters()) for layer in self._workload.model.layers
        )
        seconds = estimate(samples, wall_cpu_ratio).forward_s if samples else 0.0
        return seconds, seconds / max(1, updated)

    def measure_call_overhead(self, overhead: CallOverhead, slice_s: float) -> bool:
        """Measures what a stage's calls take whatever their layers; False: there is no room for it.

        A window's layers are in memory twice, together and singly: with half as many microbatches in flight.
        """
        window, size = overhead.window, overhead.size
        in_flight = window.in_flight // 2  # of two at least (``choose_window``)
        try:
            self.forget_window()
            modules = self._build(window)
            overhead.measure(
                self.timer,
                lambda a, b: self._steps(modules[a:b], window.layers[a:b], size, in_flight),
                slice_s,
                self.over,
            )
        except (RuntimeError, MemoryError) as exc:
            if not _is_out_of_memory(exc):
                raise
            return False
        return True

    def _fits(self, layer: DistinctLayer, size: int) -> bool:
        if (layer.index, size) in self.layer_samples.skipped:
            return False
        needs = layer.needs_bytes[size]
        if self._memory_bytes is None or needs <= self._memory_bytes:
            return True
        self._skip(
            layer,
            [size],
            f"needs {needs / 2**30:.2f} GiB for one microbatch of {size}, "
            f"the device has {self._memory_bytes / 2**30:.2f} GiB",
        )
        return False

    def _skip(self, layer: DistinctLayer, sizes: Sequence[int], reason: str) -> None:
        for size in sizes:
            self.layer_samples.skipped[layer.index, size] = reason
            self.layer_samples.drop((layer.index, size))

    def unconverged(self, layers: Sequence[DistinctLayer]) -> set[tuple[int, int]]:
        """Index and microbatch size of the layers whose mean is not known well enough yet."""
        keys = {
            (layer.index, size)
            for layer in layers
            for size in set(layer.needs_bytes) - set(layer.known_sizes)
        }
        return self.layer_samples.unconverged(keys, self.timer.wall_cpu_ratio() is not None)

    def find_cheap_window(
        self, layers: Sequence[DistinctLayer], kinds: Mapping[int, Sequence[int]]
    ) -> CallOverhead | None:
        """The window that can tell what a stage's calls take whatever their layers; None: no cheap one."""
        windows = [(size, window) for size, window, _ in self.rounds(layers, kinds)]
        return choose_window(windows, lambda size, window: self._together_s(layers, window, size))

    def _together_s(self, layers: Sequence[DistinctLayer], window: LayerWindow, size: int) -> float:
        """Mean seconds of a window's layers, run together; inf: not measured yet."""
        samples = [self.layer_samples.samples_of((layers[kind].index, size)) for kind in window.kinds]
        by_cpu = self.timer.wall_cpu_ratio() is not None
        if not all(samples):
            return math.inf
        return sum(fmean(s.cpu_s if by_cpu else s.wall_s for s in each) for each in samples)


def _is_out_of_memory(exc: BaseException) -> bool:
    kinds = tuple(k for k in (getattr(torch, "OutOfMemoryError", None), MemoryError) if k is not None)
    return (
        isinstance(exc, kinds) or "can't allocate memory" in str(exc) or "out of memory" in str(exc).lower()
    )


def _first_line(exc: BaseException) -> str:
    return str(exc).splitlines()[0][:200] if str(exc) else type(exc).__name__
