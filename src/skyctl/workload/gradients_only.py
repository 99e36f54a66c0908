"""A workload of gradients and next to no computing, for ``skyctl bench-sync``; a file as users write them.

It runs on nodes as a user's file does, and imports torch alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn


class Weights(nn.Module):
    """Parameters of which one number is used: [samples] → [samples]; the others' gradients are zeros."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.numbers = nn.Parameter(torch.zeros(count, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.numbers[0]


def model(numbers: int = 1) -> list[nn.Module]:
    """One layer with so many float32 numbers."""
    return [Weights(int(numbers))]


def data(batch_size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Ones and zeros, without end."""
    del seed  # nothing is drawn
    while True:
        yield torch.ones(batch_size), torch.zeros(batch_size)


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean square of what is off."""
    return (outputs - targets).square().mean()


def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """One that keeps no state."""
    return torch.optim.SGD(parameters, lr=1e-3)
