"""Weights as the update that is under way will probably leave them, to compute a delayed step with.

With a delay a step's gradients are applied one update after the weights that they were computed with. So
those are extrapolated by the last update: w + (w − v), where v is what they were before it. With momentum
one update is much like the next, and this undoes most of what a delay costs in loss (SpecTrain, Chen et al.
2018, arXiv 1809.02839, predicts weights from momentum, too). Without momentum an update is a single batch's
gradient, which says too little about the next one: then nothing is predicted. So it is with a momentum of 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from skyctl.workload.mixed_precision import MasterWeights

Tensor = torch.Tensor

MOMENTUM_STATES = ("exp_avg", "momentum_buffer")
"""The names that torch's optimizers have for the running mean of gradients in their state."""


class PredictedWeights:
    """The weights of a stage, and what they were before the last update.

    Per step: ``enter`` before the first forward and ``leave`` after the last backward; then ``keep`` right
    before an update whose successor is under way, or ``discard`` where none is.
    """

    def __init__(self, layers: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> None:
        self._weights = MasterWeights(p for layer in layers for p in layer.parameters())
        self._optimizer = optimizer
        self._held: list[Tensor] = []
        self._holds_now = False
        """Whether what is held is what the weights are, or were until they were extrapolated."""
        self._is_useless = not self._weights.masters

    @torch.no_grad()
    def enter(self) -> None:
        """Extrapolates the weights, and keeps what they are, if a former update is known."""
        if self._held and not has_momentum(self._optimizer):
            self._held, self._is_useless = [], True
        if not self._held:
            return
        ahead = torch._foreach_lerp(self._weights.masters, self._held, -1.0)
        torch._foreach_copy_(self._held, self._weights.masters)
        self._weights.set(ahead)
        self._holds_now = True

    def leave(self) -> None:
        """The weights are again what they were when ``enter`` was called."""
        if self._holds_now:
            self._weights.set(self._held)

    @torch.no_grad()
    def keep(self) -> None:
        """Keeps what the weights are, right before an update beside which the next one is under way."""
        if not self._holds_now and not self._is_useless:
            self._held = [weight.clone() for weight in self._weights.masters]
        self._holds_now = False

    def discard(self) -> None:
        """Drops the last update: none is under way, and a run that resumes here knows of none."""
        self._held, self._holds_now = [], False


def has_momentum(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's steps follow a running mean of gradients.

    Its state must have such a mean, and the mean must keep something of earlier gradients: Adam has one with
    ``betas=(0, …)``, too, which is the last gradient alone.
    """
    return any(
        _remembers(group) and any(_has_mean(optimizer.state.get(p)) for p in group["params"])
        for group in optimizer.param_groups
    )


def _has_mean(state: Any) -> bool:
    """Whether a parameter's state has a running mean of its gradients; an optimizer may keep anything."""
    return isinstance(state, Mapping) and any(state.get(name) is not None for name in MOMENTUM_STATES)


def _remembers(group: Mapping[str, Any]) -> bool:
    """Whether the group's running mean keeps something of earlier gradients; yes where it does not say."""
    betas = group.get("betas")
    kept = betas[0] if isinstance(betas, Sequence) and betas else group.get("momentum")
    return not isinstance(kept, int | float | Tensor) or float(kept) > 0
