"""A mixture of experts as one ordinary layer, with a mask of the experts that answer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the field's name

from skyctl.errors import WorkloadError
from skyctl.experts.routed import RoutedExperts


class Experts(RoutedExperts):
    """A layer of experts: a gate sends each token to ``top_k`` of them, and adds up what they give.

    The gate is linear and chooses among the experts that live. The softmax goes over the chosen ones that
    answer. Its ``state_dict`` has ``gate.weight`` and each expert's own names behind ``experts.N.``. Input
    and output are [..., features]; each vector of the last dimension is a token.

    After a forward, ``counts`` has the tokens that each expert was sent, ``dropped`` the number of tokens of
    which no chosen expert answered, and ``balance_loss`` the balance loss. A dropped token's output is zero.
    An expert that was sent no token is not called, and gets no gradient.

    ``balance_loss`` is a scalar with a gradient for the gate: experts · Σ fᵢ · Pᵢ. Here fᵢ is the share of
    choices that fell on expert i, and Pᵢ its mean probability over all experts. It is the loss of Switch
    Transformer (arXiv 2101.03961, equation 4), for several choices as in GShard (arXiv 2006.16668). It is 1
    for an even load, and counts what the gate chose, answered or not. A workload's ``loss`` sees outputs.
    So a layer that holds experts must pass it on as part of its value, as in ``return y,
    self.experts.balance_loss``. Each microbatch has its own, so it depends on their number.

    Args:
        make: gives an expert, a module from [tokens, features] to the same shape and dtype. It is given the
            expert's number if it has a parameter without default.
        features: the width of a token.
        experts: how many there are.
        top_k: how many of them each token is sent to.
        jitter: in training, the gate's input is multiplied by random factors from 1 - jitter to 1 + jitter.

    Attributes:
        dispatch: gives tokens to experts that are elsewhere; None: they are computed here.

    Raises:
        WorkloadError: a number is out of range, or ``make`` gives no module; in a forward: the input has
            another width, or an expert gives another shape or dtype than it was given.
    """

    def __init__(
        self,
        make: Callable[..., nn.Module],
        experts: int = 64,
        top_k: int = 4,
        *,
        features: int,
        jitter: float = 0.0,
    ) -> None:
        super().__init__()
        if experts < 1:
            raise WorkloadError(f"Experts needs at least one expert, it is given experts={experts}")
        if not 1 <= top_k <= experts:
            raise WorkloadError(f"Experts can't send a token to top_k={top_k} of {experts} experts")
        if features < 1:
            raise WorkloadError(f"Experts needs tokens of features ≥ 1, it is given features={features}")
        if not 0 <= jitter < 1:
            raise WorkloadError(f"the jitter of Experts must be from 0 to below 1, it is {jitter}")
        self.features, self.top_k, self.jitter = features, top_k, jitter
        self.gate = nn.Linear(features, experts, bias=False)
        self.experts = nn.ModuleList(_made(make, number) for number in range(experts))
        self.counts: tuple[int, ...] = (0,) * experts
        self._balance_loss: Tensor | None = None

    @property
    def count(self) -> int:
        """How many experts there are."""
        return len(self.experts)

    @property
    def trained(self) -> list[nn.Parameter]:
        """The experts' parameters, as far as they are trained."""
        return [parameter for parameter in self.experts.parameters() if parameter.requires_grad]

    def expert(self, number: int, *, alone: bool = False) -> nn.Module:  # noqa: ARG002 - as the base has it
        """The expert of that number; its memory is its own in any case."""
        return self.experts[number]

    @property
    def balance_loss(self) -> Tensor:
        """The balance loss of the last forward, a scalar.

        Raises:
            WorkloadError: there was no forward.
        """
        if self._balance_loss is None:
            raise WorkloadError("Experts has no balance loss before its first forward")
        return self._balance_loss

    def forward(self, inputs: Tensor) -> Tensor:
        """The weighted sum of what the chosen experts give for each token."""
        if inputs.shape[-1:] != (self.features,):
            raise WorkloadError(f"Experts takes [..., {self.features}], it is given {list(inputs.shape)}")
        tokens = inputs.reshape(-1, self.features)
        scores = self.gate(self._jittered(tokens))
        lives = self._lives(scores.device)
        best, chosen = scores.masked_fill(~lives, -torch.inf).topk(self.top_k, dim=-1)
        self._balance_loss = _balance_loss(scores, chosen, lives[chosen])
        each, answers = self._ask(tokens, chosen, lives, self.dispatch or self._compute)
        return (each * _weights(best, answers).unsqueeze(-1)).sum(1).view(inputs.shape)

    def __getstate__(self) -> dict[str, Any]:
        """Without the balance loss, too: graphs can't be copied."""
        return {**super().__getstate__(), "_balance_loss": None}

    def _jittered(self, tokens: Tensor) -> Tensor:
        if not self.jitter or not self.training:
            return tokens
        return tokens * torch.empty_like(tokens).uniform_(1 - self.jitter, 1 + self.jitter)

    def _compute(self, tokens: Tensor, counts: Sequence[int]) -> tuple[Tensor, Sequence[bool]]:
        parts = torch.split(tokens, list(counts))
        answers = [
            expert_answer(self.experts[number], number, part)
            for number, part in enumerate(parts)
            if counts[number]
        ]
        return torch.cat(answers) if answers else tokens, (True,) * len(counts)


def expert_answer(expert: nn.Module, number: int, tokens: Tensor) -> Tensor:
    """The expert's answer to tokens [tokens, features].

    Args:
        number: what to call it in an error.

    Raises:
        WorkloadError: it gives another shape or dtype.
    """
    answer = expert(tokens)
    if isinstance(answer, Tensor) and (answer.shape, answer.dtype) == (tokens.shape, tokens.dtype):
        return answer
    raise WorkloadError(
        f"expert {number} ({type(expert).__name__}) gives {_described(answer)} for {_described(tokens)}",
        hint="an expert must give the shape and dtype that it is given",
    )


def _made(make: Callable[..., nn.Module], number: int) -> nn.Module:
    needs = [
        parameter
        for parameter in inspect.signature(make).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    expert = make(number) if needs else make()
    if not isinstance(expert, nn.Module):
        raise WorkloadError(f"make gives {type(expert).__name__} for expert {number}, not an nn.Module")
    return expert


def _weights(best: Tensor, answers: Tensor) -> Tensor:
    """Of each choice, its weight among those of the token that answer; [tokens, k] as both arguments."""
    if bool(answers.all()):
        return best.softmax(-1)
    masked = best.masked_fill(~answers, -torch.inf)
    masked = masked.masked_fill(~answers.any(-1, keepdim=True), 0.0)  # a softmax of none is not a number
    return masked.softmax(-1) * answers


def _balance_loss(scores: Tensor, chosen: Tensor, living: Tensor) -> Tensor:
    """``living``: of each choice, whether it is one; where fewer live than are chosen, some are none."""
    count = scores.shape[-1]
    share = (F.one_hot(chosen, count) * living.unsqueeze(-1)).sum((0, 1)) / max(1, chosen.numel())
    mean = scores.softmax(-1).sum(0) / max(1, len(scores))
    return count * (share * mean).sum()


def _described(value: object) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
