"""The common parts of layers of experts: which experts live, and how tokens reach those elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from skyctl.errors import WorkloadError


class Dispatch(Protocol):
    """Gives tokens to experts, wherever these are."""

    def __call__(self, tokens: Tensor, counts: Sequence[int]) -> tuple[Tensor, Sequence[bool]]:
        """The experts' answers, and by expert whether it has answered; rows of those that have not are zero.

        Args:
            tokens: [sum(counts), features], those of each expert together, in the experts' order.
            counts: by expert, how many are its.
        """


class RoutedExperts(nn.Module):
    """A module that sends each token to some of its experts.

    Attributes:
        features: the width of a token.
        top_k: how many experts each token is sent to.
        counts: the tokens that each expert was sent in the last forward.
        dropped: of that forward, the number of tokens of which no chosen expert answered.
        dispatch: gives tokens to experts that are elsewhere; None: they are computed here.
    """

    features: int
    top_k: int
    counts: tuple[int, ...] = ()
    dropped: int = 0
    dispatch: Dispatch | None = None
    _alive: Tensor | None = None

    @property
    def count(self) -> int:
        """How many experts there are."""
        raise NotImplementedError

    def expert(self, number: int, *, alone: bool = False) -> nn.Module:
        """An expert, from [tokens, features] to the same shape and dtype.

        Args:
            alone: in memory of its own, where the module's is that of all experts.
        """
        raise NotImplementedError

    @property
    def trained(self) -> list[nn.Parameter]:
        """The module's own parameters that hold its experts, as far as they are trained."""
        raise NotImplementedError

    @property
    def alive(self) -> tuple[bool, ...]:
        """By expert, whether it may be chosen. Set it to such a sequence before a forward; all live at first.

        Raises:
            WorkloadError: it has another length, or says that none answers.
        """
        return (True,) * self.count if self._alive is None else tuple(self._alive.tolist())

    @alive.setter
    def alive(self, mask: Sequence[bool]) -> None:
        lives = [bool(value) for value in mask]
        if len(lives) != self.count:
            raise WorkloadError(f"the mask names {len(lives)} experts, the layer has {self.count}")
        if not any(lives):
            raise WorkloadError(
                f"the mask says that none of the {len(lives)} experts lives",
                hint="leave the step out, or wait for an expert",
            )
        self._alive = None if all(lives) else torch.tensor(lives)

    @contextmanager
    def without_experts(self) -> Iterator[None]:
        """Within it each answer is the token itself, so that only what is around the experts computes."""
        before, self.dispatch = self.dispatch, lambda tokens, counts: (tokens, (True,) * len(counts))
        try:
            yield
        finally:
            self.dispatch = before

    def __getstate__(self) -> dict[str, Any]:
        """Without the dispatch: connections can't be copied."""
        return {**self.__dict__, "dispatch": None}

    def _lives(self, device: torch.device) -> Tensor:
        """By expert, whether it may be chosen."""
        if self._alive is None:
            return torch.ones(self.count, dtype=torch.bool, device=device)
        return self._alive.to(device)

    def _ask(
        self, tokens: Tensor, chosen: Tensor, lives: Tensor, dispatch: Dispatch
    ) -> tuple[Tensor, Tensor]:
        """Sends tokens to the chosen experts that live; sets ``counts`` and ``dropped``.

        Args:
            tokens: [tokens, features].
            chosen: [tokens, k], experts.
            lives: by expert.

        Returns:
            Of each choice its answer, [tokens, k, features], and whether there is one, [tokens, k].
        """
        answers = lives[chosen]
        k = chosen.shape[-1]
        # Choices by expert; behind them those of the dead, where fewer live than are chosen.
        flat = chosen.reshape(-1).masked_fill(~answers.reshape(-1), self.count)
        order = flat.argsort(stable=True)
        *counts, unsent = torch.bincount(flat, minlength=self.count + 1).tolist()
        sent = tokens[(order // k)[: len(order) - unsent]]
        answered, answering = dispatch(sent, counts)
        if not all(answering):
            answers = answers & torch.tensor(answering, device=chosen.device)[chosen]
        answered = torch.cat([answered, tokens.new_zeros(unsent, tokens.shape[-1])])
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        self.counts = tuple(counts)
        self.dropped = int((~answers.any(-1)).sum())
        return answered[back].view(-1, k, tokens.shape[-1]), answers
