"""Layers' state beside parameters, kept from step to step: the running figures of norms, and other buffers.

Norms train with the figures of their own microbatches; their running figures are averaged over all replicas
before they are saved or validated with. A step that is made again begins with the buffers it began with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from skyctl.errors import RunError
from skyctl.worker.sums.route_sum import RouteSum
from skyctl.worker.sums.sum_layout import SumLayout
from skyctl.worker.sums.sum_messages import FIGURES
from skyctl.worker.sums.sum_work import SumWork

Tensor = torch.Tensor


class BatchNormStats:
    """The running mean and variance of one norm, and how many batches it has seen."""

    def __init__(self, module: nn.Module) -> None:
        self._buffers = [b for b in (module.running_mean, module.running_var) if isinstance(b, Tensor)]
        count = module.num_batches_tracked
        self._count = count if isinstance(count, Tensor) else None
        self._counted = 0
        self.numel = sum(buffer.numel() for buffer in self._buffers) + 1
        self.mark()

    def mark(self) -> None:
        """Batches are counted from now on."""
        self._counted = 0 if self._count is None else int(self._count.item())

    def weighted(self, share: float) -> Tensor:
        """The figures times the share of the microbatches they are of, and the batches since ``mark``."""
        more = 0 if self._count is None else int(self._count.item()) - self._counted
        parts = [buffer.detach().float().cpu().reshape(-1) * share for buffer in self._buffers]
        return torch.cat([*parts, torch.tensor([more], dtype=torch.float32)])

    def set(self, summed: Tensor) -> None:
        """Takes what all replicas' figures sum to. RunError: the number of batches seen is none."""
        at, seen = 0, summed[-1].item()
        if not (math.isfinite(seen) and seen >= 0):
            raise RunError(f"the batches that holders say a norm has seen add up to {seen:g}")
        with torch.no_grad():
            for buffer in self._buffers:
                buffer.copy_(summed[at : at + buffer.numel()].view(buffer.shape))
                at += buffer.numel()
            if self._count is not None:
                self._count.fill_(self._counted + round(seen))
        self.mark()


def batch_norm_stats(layer: nn.Module) -> list[BatchNormStats]:
    """Those of the layer's norms that have any."""
    norms = [m for m in layer.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
    return [BatchNormStats(module) for module in norms if isinstance(module.running_mean, Tensor)]


def average_figures(
    sums: RouteSum, layout: SumLayout, figures: Sequence[BatchNormStats], share: float, step: int
) -> None:
    """Gives every replica the mean of all replicas' figures, weighted by microbatches.

    Args:
        layout: of the figures, as one bucket.
        share: of the step's microbatches, that this replica's figures are of.
    """
    sum_work = SumWork(layout, step, kind=FIGURES)
    values = [figure.weighted(share) for figure in figures]
    sums.begin(sum_work)
    sum_work.add_bucket(values)
    sum_work.wait()
    for figure, summed in zip(figures, values, strict=True):
        figure.set(summed)


class SavedBuffers:
    """The buffers of layers as they were when it was made."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        modules = [module for layer in layers for module in layer.modules()]
        self._saved = [
            (module, name, buffer, buffer.detach().clone())
            for module in modules
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def restore(self) -> None:
        """Gives the layers the same tensors, with the values of then."""
        with torch.no_grad():
            for module, name, buffer, values in self._saved:
                module._buffers[name] = buffer
                buffer.copy_(values)
