"""Seconds of every distinct layer of a workload on one device, done as the worker does it.

A few consecutive layers are built at a time (``windows``); what is done with them stands in ``steps``.
Gradients accumulate over repetitions as they do over microbatches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import nn

from skyctl.probe.node.clock import Meter, block_sizes, collect
from skyctl.probe.node.conductor import Conductor
from skyctl.probe.node.drain import drain
from skyctl.probe.node.entering import Entering, chosen
from skyctl.probe.node.figures import Clock, figures
from skyctl.probe.node.steps import ChainSteps, OptimizerSteps
from skyctl.probe.node.tally import AIM, Tally
from skyctl.probe.node.weights import Backwards, measure_split
from skyctl.probe.node.windows import Window, singly, windows
from skyctl.workload.workload import Workload

OPTIMIZER_SHARE = 0.25
"""An optimizer's slice, as part of a layer's: it runs once a step."""

MIN_TOTAL_S = 1.0
FIRST_SHARE = 0.5
"""Of the budget, for the first pass over layers in company. What counts is then measured for as long as the
budget says in any case: a machine's speed also changes within seconds, which no interval of one second's
repetitions shows."""

ENOUGH_SPLITS, ENOUGH_UPDATES = 4, 100
"""So many repetitions of a backward in two parts, and of an optimizer's step; later passes leave them out.
While what is measured counts, one is enough."""
FIRST_CAP = 0.8
"""Of the time there is at most, for the first pass: what it does not come to is skipped."""
ANSWER_S = 0.1
"""Time for the order to stop, which who is measured last gets at once: what is begun is also ended."""
MIN_PERIODS = 25
"""A device is measured at least so long and over so many quota periods, for the stretch to be right."""


@dataclass(frozen=True)
class LayerTask:
    """One distinct layer, the first of its kind, at the microbatch sizes to measure.

    ``signatures`` and ``needs_bytes`` (what running it takes) are by microbatch size. ``known``: sizes at
    which it is only run as company for others.
    """

    index: int
    name: str
    signatures: dict[int, str]
    needs_bytes: dict[int, float]
    known: frozenset[int] = frozenset()

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> LayerTask:
        """From the launcher's JSON, whose keys are strings."""
        signatures = {int(size): str(signature) for size, signature in raw["signatures"].items()}
        needs = {int(size): float(needed) for size, needed in raw["needs_bytes"].items()}
        known = frozenset(int(size) for size in raw.get("known", ()))
        return cls(int(raw["index"]), str(raw["name"]), signatures, needs, known)


@dataclass(frozen=True)
class _Slices:
    """Seconds for a layer: in company, by itself; and the warm-up before what counts."""

    company_s: float
    whole_s: float
    warm_up_s: float


class LayerBench:
    """Measures a workload's distinct layers on one device, in passes over all of them.

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
        self._quota = quota
        self.meter = Meter(
            device,
            slowdown,
            single_thread=threads == 1,
            quota_cpus=quota["cpus"] if quota else None,
            period_s=quota["period_s"] if quota else 0.0,
        )
        self.tally = Tally()
        self._counting = False
        """While only the layers as a whole are measured."""
        self.entering: Entering | None = None
        """What of it is known; None: layers are not that cheap, or of an accelerator."""
        self._alone: set[int] = set()
        """Tasks that found no memory in company."""
        self._over: Callable[[], bool] = lambda: False
        """Whether what is being done should end now, whatever is missing."""

    def measure(
        self,
        tasks: Sequence[LayerTask],
        budget_s: float,
        cap_s: float,
        conductor: Conductor,
        kinds: Mapping[int, Sequence[int]] | None = None,
        *,
        entering: bool = True,
    ) -> None:
        """A pass over all layers in about ``budget_s`` / 2, then passes that count, with all others.

        What is run then goes on until the order to stop, or for ``cap_s`` in all: that keeps the device as
        busy as training will, while others that share its machine are measured.

        Args:
            kinds: by microbatch size, the task (its position) that each layer of the workload is one of;
                None: every layer is timed by itself.
            entering: whether to find out what a stage takes whatever its layers.
        """
        period_s = self._quota["period_s"] if self._quota else 0.0
        drain(self._quota)
        start = time.monotonic()
        end = start + cap_s
        parts = sum(len(task.needs_bytes) + OPTIMIZER_SHARE for task in tasks) or 1.0
        slice_s = max(0.02, budget_s / parts)
        slices = _Slices(FIRST_SHARE * slice_s, slice_s, 2 * period_s)
        self._over = lambda: time.monotonic() >= start + FIRST_CAP * cap_s
        self._pass(tasks, kinds, slices, conductor)
        if self.meter.layers_wait and not self.meter.by_wall:
            self.meter.by_wall = True
            self.tally = Tally(skipped=self.tally.skipped)
            self._pass(tasks, kinds, slices, conductor)
        conductor.passed()
        slices = _Slices(slice_s, slice_s, 0.0)
        self._go_on(tasks, kinds, slices, conductor, lambda: conductor.count_s() is not None, end)
        self.tally.count()
        self._counting = True
        if entering and kinds is not None and self.meter.on_cpu:
            rounds = [(size, window) for size, window, _ in self._rounds(tasks, kinds)]
            self.entering = chosen(rounds, lambda size, window: self._window_s(tasks, window, size))
        begun = time.monotonic()
        least_s = max(MIN_TOTAL_S, MIN_PERIODS * period_s, budget_s)
        until = min(end, begun + max(least_s, conductor.count_s() or 0.0))
        parts += self.entering is not None
        slices = _Slices(max(budget_s, until - begun) / parts, slice_s, 0.0)
        self._over = lambda: time.monotonic() >= until
        rough: set[tuple[int, int]] | None = None
        while self.tally.known and not self._over():
            self._pass(tasks, kinds, slices, conductor, rough)
            rough = self._unsteady(tasks)
            steady = not rough and self.meter.stretch_interval() <= AIM
            if steady and time.monotonic() >= begun + least_s:
                break
        self._counting = False
        conductor.measured()
        time.sleep(ANSWER_S)
        self._go_on(tasks, kinds, slices, conductor, lambda: False, end)

    def _go_on(
        self,
        tasks: Sequence[LayerTask],
        kinds: Mapping[int, Sequence[int]] | None,
        slices: _Slices,
        conductor: Conductor,
        over: Callable[[], bool],
        end: float,
    ) -> None:
        """Passes until then, until the order to stop, or until ``end`` (``time.monotonic``)."""
        self._over = lambda: over() or conductor.stopped() or time.monotonic() >= end
        while not self._over():
            self._pass(tasks, kinds, slices, conductor, self._unsteady(tasks))
            if not self.tally.known:  # everything was skipped: nothing to be busy with
                time.sleep(0.05)

    def _pass(
        self,
        tasks: Sequence[LayerTask],
        kinds: Mapping[int, Sequence[int]] | None,
        slices: _Slices,
        conductor: Conductor,
        rough: set[tuple[int, int]] | None = None,
    ) -> None:
        """Once over all layers, or where some are ``rough``, over those."""
        entering = self.entering if self._counting else None  # first: what comes last may find no time
        if entering is not None and not entering.known(self.stretch() is not None):
            self._measure_entering(entering, slices.company_s)
        updated: set[int] = set()
        for size, window, timed in self._rounds(tasks, kinds):
            if rough and not any((tasks[number].index, size) in rough for number in timed):
                continue
            if self._over():
                return
            done = timed[0] if rough is None else max(0, len(tasks) - len(rough))
            conductor.progress(done, len(tasks), tasks[timed[0]].name)
            self._measure_window(tasks, window, size, timed, slices, updated)

    def _measure_entering(self, entering: Entering, slice_s: float) -> None:
        """What a stage takes whatever its layers; without room for it, it is not known.

        A window's layers are there twice, together and singly: with half as many microbatches in flight.
        """
        window, size = entering.window, entering.size
        in_flight = max(1, window.in_flight // 2)
        try:
            modules = self._workload.build(window.start, window.stop, self._device)
            for module in modules:
                module.train()
            entering.measure(
                self.meter,
                lambda a, b: self._steps(modules[a:b], window.start + a, size, in_flight),
                slice_s,
                self._over,
            )
        except (RuntimeError, MemoryError) as exc:
            if not _out_of_memory(exc):
                raise
            self.entering = None

    def _window_s(self, tasks: Sequence[LayerTask], window: Window, size: int) -> float:
        """Its layers, together."""
        known = [self.tally.of((tasks[kind].index, size)) for kind in window.kinds]
        by_cpu = self.stretch() is not None
        if not all(known):
            return math.inf
        return sum(fmean(s.cpu_s if by_cpu else s.wall_s for s in each) for each in known)

    def _unsteady(self, tasks: Sequence[LayerTask]) -> set[tuple[int, int]]:
        """(layer index, microbatch size) of those whose mean is not known well enough yet."""
        keys = {(task.index, size) for task in tasks for size in set(task.needs_bytes) - task.known}
        return self.tally.unsteady(keys, self.stretch() is not None)

    def _rounds(
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
            chosen = [Window(index, index + 1, (number,)) for number, index in wanted]
            if kinds is not None and self.meter.on_cpu:
                needs = [task.needs_bytes.get(size, math.inf) for task in tasks]
                room_bytes = math.inf if self._memory_bytes is None else self._memory_bytes
                chosen = windows(kinds[size], wanted, needs, self._alone, room_bytes)
            left = {number for number, _ in wanted}
            for window in chosen:
                timed = sorted(left & set(window.kinds))
                left -= set(timed)
                found.append((size, window, timed))
        return found

    def _measure_window(
        self,
        tasks: Sequence[LayerTask],
        window: Window,
        size: int,
        timed: Sequence[int],
        slices: _Slices,
        updated: set[int],
    ) -> None:
        """Every layer in it at one size; the parts of the backward and the optimizer for the tasks timed."""
        modules: list[nn.Module] = []
        doing = "while the layer was built"
        try:
            modules = self._workload.build(window.start, window.stop, self._device)
            for module in modules:
                module.train()
            doing = f"at {size} samples"
            self._measure_chain(tasks, window, modules, size, slices, len(timed))
            for number in timed:
                at = window.kinds.index(number)
                index = tasks[number].index
                hurried = self._counting or self._over()
                splits, updates = (1, 1) if hurried else (ENOUGH_SPLITS, ENOUGH_UPDATES)
                if len(self.tally.cut(index, size)) < splits:
                    self._measure_split(tasks[number], modules[at], window.start + at, size, slices.whole_s)
                if number not in updated and len(self.tally.of((index, 0))) < updates:
                    updated.add(number)
                    self._measure_optimizer(tasks[number], modules[at], slices.whole_s * OPTIMIZER_SHARE)
        except (RuntimeError, MemoryError) as exc:
            if not _out_of_memory(exc):
                raise
            modules = []
            if len(window.kinds) == 1:
                self._alone.update(window.kinds)
                self._skip(tasks[window.kinds[0]], [size], f"out of memory {doing}: {_short(exc)}")
                return
            self._alone.update(window.kinds)
            for single in singly(window):
                if single.kinds[0] in timed:
                    self._measure_window(tasks, single, size, single.kinds, slices, updated)

    def _measure_chain(
        self,
        tasks: Sequence[LayerTask],
        window: Window,
        modules: Sequence[nn.Module],
        size: int,
        slices: _Slices,
        count: int,
    ) -> None:
        steps = self._steps(modules, window.start, size, window.in_flight)
        samples = collect(
            self.meter,
            steps,
            slice_s=slices.company_s * count,
            warm_up_s=slices.warm_up_s,
            over=self._over,
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
        by_cpu = self.meter.by_cpu and (self._threads == 1 or self._quota is not None)
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

    def stretch(self) -> float | None:
        """Wall seconds per CPU second on this device; None where wall time is used as it is."""
        return self.meter.stretch()

    def action_s(self) -> float:
        """What a stage's forward and backward take whatever their layers, by the clock of the stretch."""
        return 0.0 if self.entering is None else self.entering.seconds(self.stretch() is not None)

    def left_out_s(self) -> float:
        """Seconds that it stood still for other things than a processor, which its times do not hold."""
        if self.meter.stretches is None or self.meter.by_wall:
            return 0.0
        return self.meter.stretches.left_out_s()

    def timings(self, tasks: Sequence[LayerTask], action_s: float = 0.0) -> list[dict[str, Any]]:
        """``LayerTiming`` as dicts, one for every layer and size asked for.

        Args:
            action_s: as ``action_s()`` gives it.
        """
        clock = Clock(self.stretch(), self.meter.by_cpu, self.meter.stretch_interval())
        return [
            {"signature": task.signatures[size], "microbatch_size": size}
            | figures(self.tally, (task.index, size), clock, action_s)
            for task in tasks
            for size in sorted(task.needs_bytes)
        ]


def _out_of_memory(exc: BaseException) -> bool:
    kinds = tuple(k for k in (getattr(torch, "OutOfMemoryError", None), MemoryError) if k is not None)
    return (
        isinstance(exc, kinds) or "can't allocate memory" in str(exc) or "out of memory" in str(exc).lower()
    )


def _short(exc: BaseException) -> str:
    return str(exc).splitlines()[0][:200] if str(exc) else type(exc).__name__
