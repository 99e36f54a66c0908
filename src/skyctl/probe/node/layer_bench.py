"""Seconds of every distinct layer of a workload on one device, measured as the worker runs them.

All devices go through their layers at the same time, in passes: the first tells how long layers take, those
that follow count. ``window_bench`` has what is done in a pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from skyctl.probe.node.call_overhead import CallOverhead
from skyctl.probe.node.probe_requests import DistinctLayer
from skyctl.probe.node.samples import TARGET_INTERVAL, ClockScale, LayerKey, timing_figures
from skyctl.probe.node.wall_cpu_ratio import drain_burst
from skyctl.probe.node.window_bench import OPTIMIZER_SHARE, LayerBudget, WindowBench

MIN_TOTAL_S = 1.0
FIRST_SHARE = 0.5
"""Of the budget, for the first pass over layers in company. The measurement that counts then takes as long as
the budget says in any case. A machine's speed also changes within seconds, which no interval of one second's
repetitions shows."""

FIRST_PASS_CAP = 0.8
"""Of the time there is at most, for the first pass: what it does not come to is skipped."""
ORDER_GRACE_S = 0.1
"""Time for the order to count, or to stop, which the last device gets at once: a repetition that is under way
is not ended by it."""
MIN_PERIODS = 25
"""A device is measured over so many quota periods at least, for its wall/CPU ratio to be right."""


class PassCoordinator(Protocol):
    """Keeps all devices in step, so that those that share a machine are measured in the same seconds."""

    def progress(self, done: int, of: int, what: str) -> None:
        """So many of a pass's layers are done; ``what`` is the layer under way."""

    def passed(self) -> None:
        """This device's first pass is over."""

    def count_s(self) -> float | None:
        """For how long what is measured counts, at most; None: others are still at their first pass."""

    def measured(self) -> None:
        """All layers of this device have converged, or the time is spent."""

    def stopped(self) -> bool:
        """Whether the other devices have measured everything, too."""


class LayerBench:
    """Measures a workload's distinct layers on one device, in passes over all of them.

    Args:
        bench: measures one window at a time.
    """

    def __init__(self, bench: WindowBench) -> None:
        self.bench = bench
        self._layers: Sequence[DistinctLayer] = ()
        self._kinds: Mapping[int, Sequence[int]] | None = None
        self._coordinator: PassCoordinator
        self._call_overhead: CallOverhead | None = None
        """None: not measured, because no layers are cheap enough or the device is an accelerator."""

    def measure(
        self,
        layers: Sequence[DistinctLayer],
        budget_s: float,
        cap_s: float,
        coordinator: PassCoordinator,
        kinds: Mapping[int, Sequence[int]] | None = None,
        *,
        with_call_overhead: bool = True,
    ) -> None:
        """A pass over all layers in about ``budget_s`` / 2, then passes that count, with all other devices.

        Passes are then repeated until the order to stop, or for ``cap_s`` in all: that keeps the device as
        busy as training will, while others that share its machine are measured.

        Args:
            kinds: by microbatch size, the position in ``layers`` that each layer of the workload is like;
                None: every layer is timed by itself.
            with_call_overhead: whether to measure what a stage's calls take whatever their layers.
        """
        self._layers, self._kinds, self._coordinator = layers, kinds, coordinator
        period_s = self.bench.quota["period_s"] if self.bench.quota else 0.0
        drain_burst(self.bench.quota)
        start = time.monotonic()
        end = start + cap_s
        parts = sum(len(layer.needs_bytes) + OPTIMIZER_SHARE for layer in layers) or 1.0
        slice_s = max(0.02, budget_s / parts)
        budget = LayerBudget(FIRST_SHARE * slice_s, slice_s, 2 * period_s)
        self.bench.over = lambda: time.monotonic() >= start + FIRST_PASS_CAP * cap_s
        self._pass(budget)
        if self.bench.timer.layers_wait and not self.bench.timer.by_wall:
            self.bench.use_wall_clock()
            self._pass(budget)
        coordinator.passed()
        time.sleep(ORDER_GRACE_S)
        budget = LayerBudget(slice_s, slice_s, 0.0)
        self._repeat_passes(budget, lambda: coordinator.count_s() is not None, end)
        if with_call_overhead and kinds is not None and self.bench.timer.on_cpu:
            self._call_overhead = self.bench.find_cheap_window(layers, kinds)
            parts += self._call_overhead is not None
        least_s = max(MIN_TOTAL_S, MIN_PERIODS * period_s, budget_s)
        until = min(end, time.monotonic() + max(least_s, coordinator.count_s() or 0.0))
        window_s = max(budget_s, until - time.monotonic()) / parts
        self._measure_together(LayerBudget(window_s, slice_s, 0.0), least_s, until)
        if self.bench.layer_samples.known:
            self.bench.measure_update_call(slice_s * OPTIMIZER_SHARE)
        coordinator.measured()
        time.sleep(ORDER_GRACE_S)
        self._repeat_passes(budget, lambda: False, end)
        self.bench.forget_window()

    def _measure_together(self, budget: LayerBudget, least_s: float, until: float) -> None:
        """The passes that count: for ``least_s`` at least, till all has converged or ``until`` is reached."""
        self.bench.layer_samples.start_counting()
        self.bench.counting = True
        begun = time.monotonic()
        self.bench.over = lambda: time.monotonic() >= until
        unconverged: set[LayerKey] | None = None
        while self.bench.layer_samples.known and not self.bench.over():
            self._pass(budget, unconverged)
            unconverged = self.bench.unconverged(self._layers)
            converged = not unconverged and self.bench.timer.wall_cpu_ratio_interval() <= TARGET_INTERVAL
            if converged and time.monotonic() >= begun + least_s:
                break
        self.bench.counting = False

    def _repeat_passes(self, budget: LayerBudget, over: Callable[[], bool], end: float) -> None:
        """Passes until ``over``, until the order to stop, or until ``end`` (``time.monotonic``)."""
        self.bench.over = lambda: over() or self._coordinator.stopped() or time.monotonic() >= end
        while not self.bench.over():
            self._pass(budget, self.bench.unconverged(self._layers))
            if not self.bench.layer_samples.known:  # everything was skipped: nothing to be busy with
                time.sleep(0.05)

    def _pass(self, budget: LayerBudget, only: set[LayerKey] | None = None) -> None:
        """Once over all layers, or over those of ``only`` where there are any."""
        overhead = self._call_overhead if self.bench.counting else None
        # First of all: what comes last in a pass may find no time.
        if overhead is not None and not overhead.known(self.wall_cpu_ratio() is not None):
            fits = self.bench.measure_call_overhead(overhead, budget.window_s)
            self._call_overhead = overhead if fits else None
        updated: set[int] = set()
        for size, window, timed in self.bench.rounds(self._layers, self._kinds):
            if only and not any((self._layers[number].index, size) in only for number in timed):
                continue
            if self.bench.over():
                return
            done = timed[0] if only is None else max(0, len(self._layers) - len(only))
            self._coordinator.progress(done, len(self._layers), self._layers[timed[0]].name)
            self.bench.measure(self._layers, window, size, timed, budget, updated)

    def action_s(self) -> float:
        """The time that a stage's forward and backward take together, whatever their layers.

        In seconds of the CPU's clock where there is a wall/CPU ratio, else of the wall's.
        """
        if self._call_overhead is None:
            return 0.0
        return self._call_overhead.seconds(self.wall_cpu_ratio() is not None)

    def wall_cpu_ratio(self) -> float | None:
        """Wall seconds per CPU second on this device; None where wall time is used as it is."""
        return self.bench.timer.wall_cpu_ratio()

    def left_out_s(self) -> float:
        """Seconds that the thread waited for other things than a processor, which no layer's time holds."""
        if self.bench.timer.cpu_slices is None or self.bench.timer.by_wall:
            return 0.0
        return self.bench.timer.cpu_slices.left_out_s()

    def timings(self, layers: Sequence[DistinctLayer], action_s: float = 0.0) -> list[dict[str, Any]]:
        """``LayerTiming`` as dicts, one for every layer and size asked for.

        Args:
            action_s: what is taken off the windows' times, as ``action_s()`` gives it.
        """
        timer = self.bench.timer
        clock = ClockScale(self.wall_cpu_ratio(), timer.by_cpu, timer.wall_cpu_ratio_interval())
        update_call_s = self.bench.update_call_s(clock.wall_cpu_ratio)
        return [
            {"signature": layer.signatures[size], "microbatch_size": size}
            | timing_figures(self.bench.layer_samples, (layer.index, size), clock, action_s, update_call_s)
            for layer in layers
            for size in sorted(layer.needs_bytes)
        ]
