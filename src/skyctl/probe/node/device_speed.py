"""Speeds of a device whatever the workload: at an MLP, for when there is none, and at adding up gradients."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import nn

from skyctl.probe.node.repetition_timer import RepetitionTimer, collect_samples
from skyctl.probe.node.samples import TimingSample, estimate
from skyctl.probe.node.wall_cpu_ratio import drain_burst

WIDTH = 512
CPU_TOKENS = 256
ACCELERATOR_TOKENS = 16384


class MlpRepetition:
    """Two matrix products with four times the width between them."""

    def __init__(self, device: str, tokens: int) -> None:
        self._module = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        ).to(device=device)
        self._input = torch.randn(tokens, WIDTH, dtype=torch.float32, device=device)
        self._grad = torch.randn(tokens, WIDTH, dtype=torch.float32, device=device)
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
    samples: list[TimingSample] = collect_samples(
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
    estimated = estimate(samples, timer.wall_cpu_ratio())
    return steps.flops / (estimated.forward_s + estimated.backward_s)


# Adding a gradient that was received to one's own.

REDUCE_CHUNK_BYTES = 256 << 10
"""As much is added at a time as a sync sends at a time (``records.sync.Sync.chunk_bytes``)."""
REDUCE_BYTES = 16 << 20
"""Of each of the two gradients: together more than a core has of caches to itself."""
REDUCE_PASSES = 3


def measure_reduce_byte_s(device: str, ratio: float) -> float:
    """Seconds to add one byte of a float32 gradient that was received to one's own, out of memory.

    Chunk by chunk, as a run does it: one's own is copied into the message that goes on, in host memory, and
    the other added to it. A processor's seconds are those of its clock, which others on the machine do not
    disturb; an accelerator's are the wall's. Takes some 30 ms of a core.

    Args:
        ratio: seconds of the node for one of its processors'.
    """
    by_cpu = torch.device(device).type == "cpu" and (ratio > 1.0 or torch.get_num_threads() == 1)
    clock = time.process_time if by_cpu else time.perf_counter
    numel, chunk_numel = REDUCE_BYTES // 4, REDUCE_CHUNK_BYTES // 4
    # zeros would be one page of memory, many times
    own, received = (torch.ones(numel, dtype=torch.float32, device=place) for place in (device, "cpu"))
    message = torch.empty(chunk_numel, dtype=torch.float32)
    pieces = REDUCE_BYTES // REDUCE_CHUNK_BYTES
    chunks = list(zip(own.chunk(pieces), received.chunk(pieces), strict=True))
    passes_s = []
    for _ in range(1 + REDUCE_PASSES):  # the first is warm-up
        begun_s = clock()
        for mine, other in chunks:
            message.copy_(mine)
            message.add_(other)
        passes_s.append(clock() - begun_s)
    return median(passes_s[1:]) / REDUCE_BYTES * (ratio if by_cpu else 1.0)
