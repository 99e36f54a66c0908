"""Seconds of every distinct layer of a workload on one device, done as the worker does it.

One layer is built at a time; what is done with it stands in ``steps``. Gradients accumulate over repetitions
as they do over microbatches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from skyctl.probe.node.clock import (
    Meter,
    Sample,
    collect,
    estimate,
    pooled_stretch,
)
from skyctl.probe.node.steps import LayerSteps, OptimizerSteps
from skyctl.probe.node.weights import SplitSteps, share, split
from skyctl.workload.workload import Workload

OPTIMIZER_SHARE = 0.25
"""An optimizer's slice, as part of a layer's: it runs once a step."""

MIN_TOTAL_S = 1.0
MOST_SPLIT = 1.25
"""What a backward in two parts may take of the whole one's time; more was a disturbance."""
MIN_PERIODS = 25
"""A device is measured at least so long and over so many quota periods, for the stretch to be right."""


@dataclass(frozen=True)
class LayerTask:
    """One distinct layer, the first of its kind, at the microbatch sizes to measure.

    ``signatures`` and ``needs_bytes`` (what running it takes) are by microbatch size.
    """

    index: int
    name: str
    signatures: dict[int, str]
    needs_bytes: dict[int, float]

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> LayerTask:
        """From the launcher's JSON, whose keys are strings."""
        signatures = {int(size): str(signature) for size, signature in raw["signatures"].items()}
        needs = {int(size): float(needed) for size, needed in raw["needs_bytes"].items()}
        return cls(int(raw["index"]), str(raw["name"]), signatures, needs)


@dataclass
class Tally:
    """All repetitions so far, by layer index and microbatch size; size 0 is the optimizer's step.

    ``splits``: of the backward alone, cut in two (see ``weights``).
    """

    samples: dict[tuple[int, int], list[Sample]] = field(default_factory=dict)
    splits: dict[tuple[int, int], list[Sample]] = field(default_factory=dict)
    skipped: dict[tuple[int, int], str] = field(default_factory=dict)

    def add(self, index: int, size: int, samples: Sequence[Sample]) -> None:
        """Joins new repetitions to those there are."""
        self.samples.setdefault((index, size), []).extend(samples)

    def everything(self) -> list[Sample]:
        """Every repetition of every layer."""
        return [sample for samples in self.samples.values() for sample in samples]


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
        self.meter = Meter(device, slowdown, single_thread=threads == 1)
        self.tally = Tally()

    def measure(
        self,
        tasks: Sequence[LayerTask],
        budget_s: float,
        stopped: Callable[[], bool],
        on_progress: Callable[[int, int, str], None],
        on_measured: Callable[[], None],
        cap_s: float,
    ) -> None:
        """Passes over all layers: the first in about ``budget_s``, then on until ``stopped`` or ``cap_s``.

        Going on keeps the device as busy as training will, while others that share its machine are measured.
        """
        start = time.monotonic()
        period_s = self._quota["period_s"] if self._quota else 0.0
        settle_s = max(MIN_TOTAL_S, MIN_PERIODS * period_s)
        parts = sum(len(task.needs_bytes) + OPTIMIZER_SHARE for task in tasks) or 1.0
        slice_s = max(0.02, budget_s / parts)
        told = False
        first = True
        while True:
            for number, task in enumerate(tasks):
                if told and stopped():
                    return
                on_progress(number, len(tasks), task.name)
                self._measure_layer(task, slice_s, 2 * period_s, first)
            first = False
            passed_s = time.monotonic() - start
            if not told and (passed_s >= settle_s or not self.tally.samples):
                told = True
                on_measured()
            if told and (stopped() or passed_s >= cap_s):
                return
            if not self.tally.samples:  # everything was skipped: nothing to be busy with
                time.sleep(0.05)

    def _measure_layer(self, task: LayerTask, slice_s: float, settle_s: float, first: bool) -> None:
        """One layer at every size, then its optimizer."""
        sizes = [size for size in sorted(task.needs_bytes) if self._fits(task, size)]
        if not sizes:
            return
        module: nn.Module | None = None
        try:
            module = self._workload.build(task.index, task.index + 1, self._device)[0]
            module.train()
            for size in sizes:
                self._measure_size(task, module, size, slice_s, settle_s, first)
            self._measure_optimizer(task, module, slice_s * OPTIMIZER_SHARE)
        except MemoryError as exc:
            self._skip(task, sizes, f"out of memory while the layer was built: {exc}")
        except RuntimeError as exc:
            if not _out_of_memory(exc):
                raise
            self._skip(task, sizes, f"out of memory while the layer was built: {_short(exc)}")
        finally:
            del module

    def _measure_size(
        self, task: LayerTask, module: nn.Module, size: int, slice_s: float, settle_s: float, first: bool
    ) -> None:
        try:
            steps = LayerSteps(self._workload, module, task.index, size, self._device)
            samples = collect(
                self.meter,
                steps,
                slice_s=slice_s,
                warm_up_s=settle_s if first else 0.0,
                warm_up_repeats=2 if first else 1,
            )
            self.tally.add(task.index, size, samples)
            self._measure_split(task, module, size, slice_s)
        except (RuntimeError, MemoryError) as exc:
            if not _out_of_memory(exc):
                raise
            self._skip(task, [size], f"out of memory at {size} samples: {_short(exc)}")

    def _measure_split(self, task: LayerTask, module: nn.Module, size: int, slice_s: float) -> None:
        """A layer that has no room for this is not left out: what is not known is then its weights' part."""
        steps = SplitSteps(self._workload, module, task.index, size, self._device)
        try:
            samples = split(self.meter, steps, slice_s)
        except (RuntimeError, MemoryError) as exc:
            if not _out_of_memory(exc):
                raise
        else:
            self.tally.splits.setdefault((task.index, size), []).extend(samples)

    def _measure_optimizer(self, task: LayerTask, module: nn.Module, slice_s: float) -> None:
        parameters = list(module.parameters())
        if not parameters or (task.index, 0) in self.tally.skipped:
            return
        for parameter in parameters:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        steps = OptimizerSteps(self._workload, module, self._device)
        self.tally.add(task.index, 0, collect(self.meter, steps, slice_s=slice_s))

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
            self.tally.samples.pop((task.index, size), None)

    def stretch(self) -> float | None:
        """Wall seconds per CPU second on this device; None where wall time is used as it is."""
        if not self.meter.on_cpu:
            return None
        return pooled_stretch(
            self.tally.everything(), self._threads, self._quota["cpus"] if self._quota else None
        )

    def timings(self, tasks: Sequence[LayerTask]) -> list[dict[str, Any]]:
        """``LayerTiming`` as dicts, one for every layer and size asked for."""
        stretch = self.stretch()
        rows = []
        for task in tasks:
            optimizer = self.tally.samples.get((task.index, 0))
            optimizer_s = estimate(optimizer, stretch).forward_s if optimizer else 0.0
            for size in sorted(task.needs_bytes):
                row: dict[str, Any] = {"signature": task.signatures[size], "microbatch_size": size}
                samples = self.tally.samples.get((task.index, size))
                parts = self.tally.splits.get((task.index, size))
                if samples:
                    found = estimate(samples, stretch)
                    split_s = _split_s(parts, found.backward_s, stretch) if parts else None
                    row |= {
                        "forward_s": found.forward_s,
                        "backward_s": found.backward_s,
                        "optimizer_s": optimizer_s,
                        "weight_s": split_s * share(parts, self.meter.on_cpu)
                        if parts and split_s is not None
                        else None,
                        "split_s": split_s,
                        "spread": found.spread,
                        "repeats": found.repeats,
                    }
                else:
                    row["skipped"] = self.tally.skipped.get((task.index, size), "there was no time for it")
                rows.append(row)
        return rows


def _split_s(parts: Sequence[Sample], whole_s: float, stretch: float | None) -> float:
    """Seconds of a backward in two parts; few repetitions, so not out of proportion to the whole."""
    both = estimate(parts, stretch)
    return min(max(whole_s, both.forward_s + both.backward_s), MOST_SPLIT * whole_s)


def _out_of_memory(exc: BaseException) -> bool:
    kinds = tuple(k for k in (getattr(torch, "OutOfMemoryError", None), MemoryError) if k is not None)
    return (
        isinstance(exc, kinds) or "can't allocate memory" in str(exc) or "out of memory" in str(exc).lower()
    )


def _short(exc: BaseException) -> str:
    return str(exc).splitlines()[0][:200] if str(exc) else type(exc).__name__
