"""Seconds of every distinct layer of a workload on one device, done as the worker does it.

All devices go through their layers at the same time, in passes: the first tells how long they take, those
that follow count. What is done in a pass stands in ``windowbench``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from skyctl.probe.node.conductor import Conductor
from skyctl.probe.node.drain import drain
from skyctl.probe.node.entering import Entering
from skyctl.probe.node.figures import Clock, figures
from skyctl.probe.node.tally import AIM
from skyctl.probe.node.tasks import LayerTask
from skyctl.probe.node.windowbench import OPTIMIZER_SHARE, Slices, WindowBench

MIN_TOTAL_S = 1.0
FIRST_SHARE = 0.5
"""Of the budget, for the first pass over layers in company. What counts is then measured for as long as the
budget says in any case: a machine's speed also changes within seconds, which no interval of one second's
repetitions shows."""

FIRST_CAP = 0.8
"""Of the time there is at most, for the first pass: what it does not come to is skipped."""
ANSWER_S = 0.1
"""Time for the order to stop, which who is measured last gets at once: what is begun is also ended."""
MIN_PERIODS = 25
"""A device is measured at least so long and over so many quota periods, for the stretch to be right."""


class LayerBench:
    """Measures a workload's distinct layers on one device, in passes over all of them.

    Args:
        bench: measures one window at a time.
    """

    def __init__(self, bench: WindowBench) -> None:
        self.bench = bench
        self._entering: Entering | None = None
        """What of it is known; None: layers are not that cheap, or of an accelerator."""

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
        period_s = self.bench.quota["period_s"] if self.bench.quota else 0.0
        drain(self.bench.quota)
        start = time.monotonic()
        end = start + cap_s
        parts = sum(len(task.needs_bytes) + OPTIMIZER_SHARE for task in tasks) or 1.0
        slice_s = max(0.02, budget_s / parts)
        slices = Slices(FIRST_SHARE * slice_s, slice_s, 2 * period_s)
        self.bench.over = lambda: time.monotonic() >= start + FIRST_CAP * cap_s
        self._pass(tasks, kinds, slices, conductor)
        if self.bench.meter.layers_wait and not self.bench.meter.by_wall:
            self.bench.go_by_wall()
            self._pass(tasks, kinds, slices, conductor)
        conductor.passed()
        slices = Slices(slice_s, slice_s, 0.0)
        self._go_on(tasks, kinds, slices, conductor, lambda: conductor.count_s() is not None, end)
        self.bench.tally.count()
        self.bench.counting = True
        if entering and kinds is not None and self.bench.meter.on_cpu:
            self._entering = self.bench.cheap_window(tasks, kinds)
        begun = time.monotonic()
        least_s = max(MIN_TOTAL_S, MIN_PERIODS * period_s, budget_s)
        until = min(end, begun + max(least_s, conductor.count_s() or 0.0))
        parts += self._entering is not None
        slices = Slices(max(budget_s, until - begun) / parts, slice_s, 0.0)
        self.bench.over = lambda: time.monotonic() >= until
        rough: set[tuple[int, int]] | None = None
        while self.bench.tally.known and not self.bench.over():
            self._pass(tasks, kinds, slices, conductor, rough)
            rough = self.bench.unsteady(tasks)
            steady = not rough and self.bench.meter.stretch_interval() <= AIM
            if steady and time.monotonic() >= begun + least_s:
                break
        self.bench.counting = False
        conductor.measured()
        time.sleep(ANSWER_S)
        self._go_on(tasks, kinds, slices, conductor, lambda: False, end)

    def _go_on(
        self,
        tasks: Sequence[LayerTask],
        kinds: Mapping[int, Sequence[int]] | None,
        slices: Slices,
        conductor: Conductor,
        over: Callable[[], bool],
        end: float,
    ) -> None:
        """Passes until then, until the order to stop, or until ``end`` (``time.monotonic``)."""
        self.bench.over = lambda: over() or conductor.stopped() or time.monotonic() >= end
        while not self.bench.over():
            self._pass(tasks, kinds, slices, conductor, self.bench.unsteady(tasks))
            if not self.bench.tally.known:  # everything was skipped: nothing to be busy with
                time.sleep(0.05)

    def _pass(
        self,
        tasks: Sequence[LayerTask],
        kinds: Mapping[int, Sequence[int]] | None,
        slices: Slices,
        conductor: Conductor,
        rough: set[tuple[int, int]] | None = None,
    ) -> None:
        """Once over all layers, or where some are ``rough``, over those."""
        entering = self._entering if self.bench.counting else None  # first: what comes last may find no time
        if entering is not None and not entering.known(self.stretch() is not None):
            fits = self.bench.measure_entering(entering, slices.company_s)
            self._entering = entering if fits else None
        updated: set[int] = set()
        for size, window, timed in self.bench.rounds(tasks, kinds):
            if rough and not any((tasks[number].index, size) in rough for number in timed):
                continue
            if self.bench.over():
                return
            done = timed[0] if rough is None else max(0, len(tasks) - len(rough))
            conductor.progress(done, len(tasks), tasks[timed[0]].name)
            self.bench.measure(tasks, window, size, timed, slices, updated)

    def action_s(self) -> float:
        """What a stage's forward and backward take whatever their layers, by the clock of the stretch."""
        return 0.0 if self._entering is None else self._entering.seconds(self.stretch() is not None)

    def stretch(self) -> float | None:
        """Wall seconds per CPU second on this device; None where wall time is used as it is."""
        return self.bench.meter.stretch()

    def left_out_s(self) -> float:
        """Seconds that it stood still for other things than a processor, which its times do not hold."""
        if self.bench.meter.stretches is None or self.bench.meter.by_wall:
            return 0.0
        return self.bench.meter.stretches.left_out_s()

    def timings(self, tasks: Sequence[LayerTask], action_s: float = 0.0) -> list[dict[str, Any]]:
        """``LayerTiming`` as dicts, one for every layer and size asked for.

        Args:
            action_s: as ``action_s()`` gives it.
        """
        clock = Clock(self.stretch(), self.bench.meter.by_cpu, self.bench.meter.stretch_interval())
        return [
            {"signature": task.signatures[size], "microbatch_size": size}
            | figures(self.bench.tally, (task.index, size), clock, action_s)
            for task in tasks
            for size in sorted(task.needs_bytes)
        ]
