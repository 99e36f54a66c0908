"""The weights that a round began with: kept, restored, and what they are needed for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from skyctl.worker.sums.batch_norm_stats import SavedBuffers
from skyctl.workload.mixed_precision import MasterWeights, accumulate_into_master, master_of

Tensor = torch.Tensor


class RoundStart:
    """The weights and buffers of a stage, as they were at a round's start.

    Attributes:
        weights: the stage's trained weights, as they are now.
        values: in their order, what their masters were.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = list(layers)
        self.weights = MasterWeights(p for layer in layers for p in layer.parameters())
        masters = self.weights.masters
        self.values = [torch.empty_like(master) for master in masters]
        self._value_of = {id(master): value for master, value in zip(masters, self.values, strict=True)}
        self._buffers: SavedBuffers | None = None

    @torch.no_grad()
    def take(self) -> None:
        """Keeps the weights and buffers that a round begins with."""
        if self.values:
            torch._foreach_copy_(self.values, self.weights.masters)
        self._buffers = SavedBuffers(self._layers)

    def restore(self) -> None:
        """Nobody's work counts: all is as it was."""
        self.weights.set(self.values)
        if self._buffers is not None:
            self._buffers.restore()

    @torch.no_grad()
    def add_difference(self, mu: float) -> None:
        """Adds µ(w − w₀) to every gradient there is."""
        parts = zip(self.weights.parameters, self.weights.masters, self.values, strict=True)
        for parameter, master, saved in parts:
            accumulate_into_master(parameter)
            if master.grad is not None:
                master.grad.add_(master - saved, alpha=mu)  # not µw − µw₀: that rounds at the size of w

    def of(self, weight: nn.Parameter) -> Tensor:
        """The value that a weight of the stage had then; of one in low precision: its master's."""
        return self._value_of[id(master_of(weight))]
