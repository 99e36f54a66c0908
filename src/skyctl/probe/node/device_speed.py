"""A device's generic speed, for when there is no workload: a transformer's MLP, forward and backward."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

from skyctl.probe.node.repetition_timer import RepetitionTimer, collect_samples
from skyctl.probe.node.samples import Sample, estimate
from skyctl.probe.node.wall_cpu_ratio import drain_burst

WIDTH = 512
CPU_TOKENS = 256
ACCELERATOR_TOKENS = 16384


class MlpRepetition:
    """Two matrix products with four times the width between them."""

    def __init__(self, device: str, tokens: int, dtype: torch.dtype = torch.float32) -> None:
        self._module = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        ).to(device=device, dtype=dtype)
        self._input = torch.randn(tokens, WIDTH, device=device, dtype=dtype)
        self._grad = torch.randn(tokens, WIDTH, device=device, dtype=dtype)
        self._output: torch.Tensor | None = None
        self.flops = 3 * 2 * (2 * tokens * WIDTH * 4 * WIDTH)
        """Of the matrix products, forward and backward: a multiply and an add are two."""

    def prepare(self) -> None:
        """Nothing has to be made: the input is used again."""

    def forward(self) -> None:
        """Through the MLP, from an input that requires its gradient."""
        self._output = self._module(self._input.detach().requires_grad_())

    def between(self) -> None:
        """Nothing happens between the two parts."""

    def backward(self) -> None:
        """Through the MLP backwards, from a fixed gradient."""
        if self._output is not None:
            torch.autograd.backward(self._output, self._grad)
            self._output = None


def measure_flops_per_s(
    device: str,
    *,
    threads: int,
    slowdown: float,
    quota: dict[str, float] | None,
    budget_s: float,
    stopped: Callable[[], bool],
    on_measured: Callable[[], None],
    cap_s: float,
) -> float:
    """Measures for ``budget_s`` (at least 25 quota periods), then on until ``stopped`` or ``cap_s``."""
    period_s = quota["period_s"] if quota else 0.0
    drain_burst(quota)
    timer = RepetitionTimer(
        device,
        slowdown,
        single_thread=threads == 1,
        quota_cpus=quota["cpus"] if quota else None,
        period_s=period_s,
    )
    steps = MlpRepetition(device, CPU_TOKENS if timer.on_cpu else ACCELERATOR_TOKENS)
    start = time.monotonic()
    samples: list[Sample] = collect_samples(
        timer,
        steps,
        slice_s=max(budget_s, 25 * period_s),
        minimum_s=max(0.5, 25 * period_s),
        warm_up_s=2 * period_s,
        warm_up_repeats=2,
    )
    on_measured()
    while not stopped() and time.monotonic() - start < cap_s:
        samples += collect_samples(timer, steps, slice_s=0.2, minimum_s=0.1)
    found = estimate(samples, timer.wall_cpu_ratio())
    return steps.flops / (found.forward_s + found.backward_s)
