"""The weights that a round began with: kept, restored, and what they are needed for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from skyctl.worker.running_figures import SavedBuffers
from skyctl.workload.mixed_precision import accumulate_into_master, master_of

Tensor = torch.Tensor


class RoundStart:
    """What a stage's weights and buffers were at a round's start."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = list(layers)
        found = {id(p): p for layer in layers for p in layer.parameters() if p.requires_grad}
        self._trained = list(found.values())
        self._weights: list[Tensor] = [master_of(p) for p in self._trained]
        self._saved = [torch.empty_like(weight) for weight in self._weights]
        self._saved_of = {id(master_of(p)): one for p, one in zip(self._trained, self._saved, strict=True)}
        self._buffers: SavedBuffers | None = None

    @torch.no_grad()
    def take(self) -> None:
        """Keeps the weights and buffers that a round begins with."""
        if self._weights:
            torch._foreach_copy_(self._saved, self._weights)
        self._buffers = SavedBuffers(self._layers)

    @torch.no_grad()
    def restore(self) -> None:
        """Nobody's work counts: all is as it was."""
        if self._weights:
            torch._foreach_copy_(self._weights, self._saved)
            torch._foreach_copy_(tuple(self._trained), self._weights)
        if self._buffers is not None:
            self._buffers.restore()

    @torch.no_grad()
    def add_difference(self, mu: float) -> None:
        """Adds µ(w − w₀) to every gradient there is."""
        for parameter, weight, saved in zip(self._trained, self._weights, self._saved, strict=True):
            accumulate_into_master(parameter)
            gradient = master_of(parameter).grad
            if gradient is not None:
                gradient.add_(weight - saved, alpha=mu)  # not µw − µw₀: that rounds at the size of w

    def of(self, weight: nn.Parameter) -> Tensor:
        """What that weight of the stage's was; of one in low precision: what its master was."""
        return self._saved_of[id(master_of(weight))]
