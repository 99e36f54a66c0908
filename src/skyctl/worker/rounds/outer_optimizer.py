"""The outer step of a round: an optimizer of its own, whose gradient is what the round has changed.

DiLoCo (arXiv 2311.08105). With w₀ the weights at a round's start, and w̄ the average at its end, SGD with
Nesterov momentum steps from w₀ along the outer gradient w₀ − w̄. At rate 1 without momentum that step is w̄
itself, so nobody makes an outer optimizer for it. With owners this is federated averaging with a server
optimizer (FedAvgM: Hsu et al. 2019, arXiv 1909.06335; FedOpt: Reddi et al. 2021, arXiv 2003.00295), except
that no server exists: all replicas of a layer compute the same step from the same bytes, and stay equal.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from skyctl.errors import RecordError
from skyctl.worker.rounds.round_start import RoundStart

Tensor = torch.Tensor
_MOMENTUM = "momentum_buffer"
"""The name that torch.optim.SGD has for the momentum of a parameter."""


class OuterOptimizer:
    """Turns each round's average of one stage's weights into the weights that the next round starts with.

    Besides the round's first weights it keeps the momentum, one number for each trained weight; it computes
    the outer gradient in the memory of the average.

    Attributes:
        start: the weights that the round began with; the caller has it ``take`` them.

    Args:
        layers: the stage's.
        lr: the outer learning rate.
        momentum: the outer Nesterov momentum, in [0, 1); 0: none is kept.
    """

    def __init__(self, layers: Sequence[nn.Module], lr: float, momentum: float) -> None:
        self.start = RoundStart(layers)
        self._optimizer: torch.optim.SGD | None = None
        if self.start.values:
            self._optimizer = torch.optim.SGD(
                self.start.values,
                lr=lr,
                momentum=momentum,
                nesterov=momentum > 0,
                foreach=False,  # one parameter after another: temporary memory for a single one
            )

    @torch.no_grad()
    def step(self) -> None:
        """Replaces the average, which the stage's weights are now, by the outer step's result."""
        if self._optimizer is None:
            return
        start = self.start
        for value, master in zip(start.values, start.weights.masters, strict=True):
            average = master.detach()
            value.grad = torch.sub(value, average, out=average)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        start.weights.set(start.values)

    def momentum_of(self, weight: nn.Parameter) -> Tensor | None:
        """The momentum of a weight of the stage; None: it has none yet, or it is not trained."""
        if self._optimizer is None or not weight.requires_grad:
            return None
        momentum: Tensor | None = self._optimizer.state.get(self.start.of(weight), {}).get(_MOMENTUM)
        return momentum

    def restore_momentum(self, weight: nn.Parameter, value: Tensor) -> None:
        """Goes on with that momentum, as a checkpoint has it.

        Raises:
            RecordError: the weight is not trained, or of another shape.
        """
        if self._optimizer is None or not weight.requires_grad or value.shape != weight.shape:
            own = list(weight.shape) if weight.requires_grad else "not trained"
            raise RecordError(
                f"it holds an outer momentum of shape {list(value.shape)} for a weight that is {own}",
                hint="was model() changed since it was written?",
            )
        kept = self.start.of(weight)
        self._optimizer.state[kept][_MOMENTUM] = torch.empty_like(kept).copy_(value)
