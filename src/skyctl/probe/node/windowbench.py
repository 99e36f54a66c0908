"""One window of layers at a time on one device: its layers, their backwards in two parts, their optimizers.

A few consecutive layers are built at a time (``windows``); what is done with them stands in ``steps``.
Gradients accumulate over repetitions as they do over microbatches. A layer that finds no memory is left out,
with the reason.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import nn

from skyctl.probe.node.clock import Meter, block_sizes, collect
from skyctl.probe.node.entering import Entering, chosen
from skyctl.probe.node.steps import ChainSteps, OptimizerSteps
from skyctl.probe.node.tally import Tally
from skyctl.probe.node.tasks import LayerTask
from skyctl.probe.node.weights import Backwards, measure_split
from skyctl.probe.node.windows import Window, singly, windows
from skyctl.workload.workload import Workload

OPTIMIZER_SHARE = 0.25
"""An optimizer's slice, as part of a layer's: it runs once a step."""

ENOUGH_SPLITS, ENOUGH_UPDATES = 4, 100
"""So many repetitions of a backward in two parts, and of an optimizer's step; later passes leave them out.
While what is measured counts, one is enough."""


@dataclass(frozen=True)
class Slices:
    """Seconds for a layer: in company, by itself; and the warm-up before what counts."""

    company_s: float
    whole_s: float
    warm_up_s: float


class WindowBench:
    """What is measured of windows, on one device.

    ``counting``: whether only the layers as a whole are measured. ``over``: whether what is being done should
    end now, whatever is missing.

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
        self.meter = Meter(
            device,
            slowdown,
            single_thread=threads == 1,
            quota_cpus=quota["cpus"] if quota else None,
            period_s=quota["period_s"] if quota else 0.0,
        )
        self.tally = Tally()
        self.counting = False
        self.over: Callable[[], bool] = lambda: False
        self._alone: set[int] = set()
        """Tasks that found no memory in company."""

    def go_by_wall(self) -> None:
        """From now on by the wall's clock; what was measured by the other is forgotten."""
        self.meter.by_wall = True
        self.tally = Tally(skipped=self.tally.skipped)

    def rounds(
        self, tasks: Sequence[LayerTask], kinds: Mapping[int, Sequence[int]] | None
    ) -> list[tuple[int, Window, list[int]]]:
        """(microbatch size, window, tasks that are timed in it for the first time) for one pass."""
        found = []
        for size in sorted({size for task in tasks for size in task.needs_bytes}):
            wanted = [
                (number, task.index)
                for number, task in enumerate(tasks)
                if size in task.needs_bytes and size not in task.known and self._fits(task, size)
            ]
            placed = [Window(index, index + 1, (number,)) for number, index in wanted]
            if kinds is not None and self.meter.on_cpu:
                needs = [task.needs_bytes.get(size, math.inf) for task in tasks]
                room_bytes = math.inf if self._memory_bytes is None else self._memory_bytes
                placed = windows(kinds[size], wanted, needs, self._alone, room_bytes)
            left = {number for number, _ in wanted}
            for window in placed:
                timed = sorted(left & set(window.kinds))
                left -= set(timed)
                found.append((size, window, timed))
        return found

    def measure(
        self,
        tasks: Sequence[LayerTask],
        window: Window,
        size: int,
        timed: Sequence[int],
        slices: Slices,
        updated: set[int],
    ) -> None:
        """Every layer in it at one size; the parts of the backward and the optimizer for the tasks timed."""
        modules: Sequence[nn.Module] = ()
        doing = "while the layer was built"
        try:
            modules = self._built(window)
            doing = f"at {size} samples"
            self._measure_chain(tasks, window, modules, size, slices, len(timed))
            for number in timed:
                at = window.kinds.index(number)
                index = tasks[number].index
                hurried = self.counting or self.over()
                splits, updates = (1, 1) if hurried else (ENOUGH_SPLITS, ENOUGH_UPDATES)
                if len(self.tally.cut(index, size)) < splits:
                    self._measure_split(tasks[number], modules[at], window.start + at, size, slices.whole_s)
                if number not in updated and len(self.tally.of((index, 0))) < updates:
                    updated.add(number)
                    self._measure_optimizer(tasks[number], modules[at], slices.whole_s * OPTIMIZER_SHARE)
        except (RuntimeError, MemoryError) as exc:
            if not _out_of_memory(exc):
                raise
            modules = ()  # their memory is needed
            if len(window.kinds) == 1:
                self._alone.update(window.kinds)
                self._skip(tasks[window.kinds[0]], [size], f"out of memory {doing}: {_short(exc)}")
                return
            self._alone.update(window.kinds)
            for single in singly(window):
                if single.kinds[0] in timed:
                    self.measure(tasks, single, size, single.kinds, slices, updated)

    def _built(self, window: Window) -> Sequence[nn.Module]:
        modules = self._workload.build(window.start, window.stop, self._device)
        for module in modules:
            module.train()
        return modules

    def _measure_chain(
        self,
        tasks: Sequence[LayerTask],
        window: Window,
        modules: Sequence[nn.Module],
        size: int,
        slices: Slices,
        count: int,
    ) -> None:
        steps = self._steps(modules, window.start, size, window.in_flight)
        samples = collect(
            self.meter,
            steps,
            slice_s=slices.company_s * count,
            warm_up_s=slices.warm_up_s,
            over=self.over,
        )
        shares = steps.shares[-len(samples) :]
        blocks = block_sizes(samples, self.meter.by_cpu)
        for at, number in enumerate(window.kinds):
            parts = [
                sample.part(forward[at], backward[at])
                for sample, (forward, backward) in zip(samples, shares, strict=True)
            ]
            self.tally.add((tasks[number].index, size), parts, blocks, samples)

    def _steps(self, modules: Sequence[nn.Module], start: int, size: int, in_flight: int = 1) -> ChainSteps:
        by_cpu = self.meter.by_cpu and (self._threads == 1 or self.quota is not None)
        clock = time.process_time if by_cpu else time.perf_counter
        return ChainSteps(
            self._workload, modules, start, size, self._device, in_flight=in_flight, clock=clock
        )

    def _measure_split(
        self, task: LayerTask, module: nn.Module, index: int, size: int, slice_s: float
    ) -> None:
        """A layer that has no room for this is not left out: what is not known is then its weights' part."""
        found = Backwards()
        try:
            measure_split(self.meter, self._steps([module], index, size), self._device, slice_s, found)
        except (RuntimeError, MemoryError) as exc:
            if not _out_of_memory(exc):
                raise
        else:
            kept = self.tally.splits.setdefault((task.index, size), Backwards())
            kept.whole += found.whole
            kept.cut += found.cut

    def _measure_optimizer(self, task: LayerTask, module: nn.Module, slice_s: float) -> None:
        parameters = list(module.parameters())
        if not parameters:
            return
        for parameter in parameters:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        steps = OptimizerSteps(self._workload, module, self._device)
        samples = collect(self.meter, steps, slice_s=slice_s)
        self.tally.add((task.index, 0), samples, block_sizes(samples, self.meter.by_cpu))

    def measure_entering(self, entering: Entering, slice_s: float) -> bool:
        """What a stage takes whatever its layers; False: there is no room for it.

        A window's layers are there twice, together and singly: with half as many microbatches in flight.
        """
        window, size = entering.window, entering.size
        in_flight = window.in_flight // 2  # of two at least (``entering.chosen``)
        try:
            modules = self._built(window)
            entering.measure(
                self.meter,
                lambda a, b: self._steps(modules[a:b], window.start + a, size, in_flight),
                slice_s,
                self.over,
            )
        except (RuntimeError, MemoryError) as exc:
            if not _out_of_memory(exc):
                raise
            return False
        return True

    def _fits(self, task: LayerTask, size: int) -> bool:
        if (task.index, size) in self.tally.skipped:
            return False
        needs = task.needs_bytes[size]
        if self._memory_bytes is None or needs <= self._memory_bytes:
            return True
        self._skip(
            task,
            [size],
            f"needs {needs / 2**30:.2f} GiB for one microbatch of {size}, "
            f"the device has {self._memory_bytes / 2**30:.2f} GiB",
        )
        return False

    def _skip(self, task: LayerTask, sizes: Sequence[int], reason: str) -> None:
        for size in sizes:
            self.tally.skipped[task.index, size] = reason
            self.tally.drop((task.index, size))

    def unsteady(self, tasks: Sequence[LayerTask]) -> set[tuple[int, int]]:
        """(layer index, microbatch size) of those whose mean is not known well enough yet."""
        keys = {(task.index, size) for task in tasks for size in set(task.needs_bytes) - task.known}
        return self.tally.unsteady(keys, self.meter.stretch() is not None)

    def cheap_window(self, tasks: Sequence[LayerTask], kinds: Mapping[int, Sequence[int]]) -> Entering | None:
        """The one that tells what a stage takes whatever its layers; None: there is none."""
        found = [(size, window) for size, window, _ in self.rounds(tasks, kinds)]
        return chosen(found, lambda size, window: self._together_s(tasks, window, size))

    def _together_s(self, tasks: Sequence[LayerTask], window: Window, size: int) -> float:
        """Its layers, together."""
        known = [self.tally.of((tasks[kind].index, size)) for kind in window.kinds]
        by_cpu = self.meter.stretch() is not None
        if not all(known):
            return math.inf
        return sum(fmean(s.cpu_s if by_cpu else s.wall_s for s in each) for each in known)


def _out_of_memory(exc: BaseException) -> bool:
    kinds = tuple(k for k in (getattr(torch, "OutOfMemoryError", None), MemoryError) if k is not None)
    return (
        isinstance(exc, kinds) or "can't allocate memory" in str(exc) or "out of memory" in str(exc).lower()
    )


def _short(exc: BaseException) -> str:
    return str(exc).splitlines()[0][:200] if str(exc) else type(exc).__name__
