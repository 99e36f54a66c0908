"""Experts that share a few parameters, one row each, as the ``transformers`` library holds them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the field's name

from skyctl.experts.routed import RoutedExperts
from skyctl.workload.mixed_precision import part_of


class FusedExperts(RoutedExperts):
    """The experts of a block whose gate is linear: a softmax over all, of which the best are taken.

    ``fuse`` makes the library's module one. While nothing is elsewhere or dead, it computes what the library
    does. Else the softmax goes over the experts that live and have answered, by the gate's own weights. A
    token of which no chosen expert answered gets zero from this module.

    Attributes:
        gate: in a tuple, for it belongs to the block.
        normalises: whether the weights of a token's experts add up to 1.
    """

    gate: tuple[nn.Module, ...]
    num_experts: int
    normalises: bool

    @property
    def count(self) -> int:
        """How many experts there are."""
        return self.num_experts

    @property
    def trained(self) -> list[nn.Parameter]:
        """The module's own parameters, as far as they are trained."""
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def expert(self, number: int, *, alone: bool = False) -> nn.Module:
        """An expert, whose parameters are its rows; they are in the module's memory unless it is alone."""
        return FusedExpert(self, number, alone=alone)

    @contextmanager
    def without_experts(self) -> Iterator[None]:
        """As the base's, and without looking at values: layers are costed on tensors that have none."""
        vars(self)["forward"] = lambda tokens, _, weights: tokens * weights.sum(-1, keepdim=True)
        try:
            yield
        finally:
            del vars(self)["forward"]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """As the library calls it: tokens [tokens, features], and each one's experts and their weights."""
        chosen, weights = top_k_index, top_k_weights
        if self._alive is not None:
            chosen, weights = self.route(hidden_states)
        if self.dispatch is None:
            computed: Tensor = super().forward(hidden_states, chosen, weights)
            return computed
        lives = self._lives(hidden_states.device)
        each, answers = self._ask(hidden_states, chosen, lives, self.dispatch)
        failed = lives[chosen] & ~answers
        if bool(failed.any()):
            lives = lives.index_fill(0, chosen[failed], False)
            weights = self._weights(self._probabilities(hidden_states, lives).gather(-1, chosen))
        weights = weights.masked_fill(~answers, 0.0)
        return (each * weights.unsqueeze(-1)).sum(1).to(hidden_states.dtype)

    def route(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Of each token, the best experts among those that live, and their weights; [tokens, k] both."""
        lives = self._lives(hidden_states.device)
        best, chosen = self._probabilities(hidden_states, lives).topk(self.top_k, dim=-1)
        return chosen, self._weights(best)

    def _probabilities(self, hidden_states: Tensor, lives: Tensor) -> Tensor:
        """[tokens, experts], of the dead 0; if none lives, 0 for all."""
        scores = F.linear(hidden_states, self.gate[0].weight).float()  # type: ignore[arg-type]
        if not bool(lives.any()):
            return torch.zeros_like(scores)
        return scores.masked_fill(~lives, -torch.inf).softmax(-1)

    def _weights(self, best: Tensor) -> Tensor:
        if not self.normalises:
            return best
        return best / best.sum(-1, keepdim=True).clamp_min(torch.finfo(best.dtype).tiny)


class FusedExpert(nn.Module):
    """One of the experts, from [tokens, features] to the same.

    Attributes:
        fused: the library's module, with one expert.
    """

    def __init__(self, experts: FusedExperts, number: int, *, alone: bool) -> None:
        super().__init__()
        self.fused: Any = copy.copy(experts)
        self.fused.__dict__.update(num_experts=1, gate=(), _alive=None)
        self.fused._parameters = {
            name: part_of(parameter, number, alone=alone)
            for name, parameter in experts._parameters.items()
            if parameter is not None
        }

    def forward(self, tokens: Tensor) -> Tensor:
        """The expert's output for the tokens."""
        first = torch.zeros(len(tokens), 1, dtype=torch.int64, device=tokens.device)
        out: Tensor = self.fused(tokens, first, torch.ones_like(first, dtype=tokens.dtype))
        return out


def fuse(experts: nn.Module, gate: nn.Module, *, features: int, top_k: int, normalises: bool) -> None:
    """Makes the library's module ``FusedExperts``. Its class is changed: so its tensors keep their names."""
    kind = type(experts)
    vars(experts).update(gate=(gate,), features=features, top_k=top_k, normalises=normalises)
    experts.__class__ = type(kind.__name__, (FusedExperts, kind), {})
