"""A mixture of experts that picks each expert's samples by a mask."""

import torch
from torch import nn


class Experts(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.router = nn.Linear(width, 2)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x):
        weights = self.router(x).softmax(-1)
        best = weights.argmax(-1)
        mixed = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            chosen = best == i
            mixed[chosen] = weights[chosen, i : i + 1] * expert(x[chosen])
        return x + mixed


def model():
    return [nn.Linear(8, 12), Experts(12), Experts(12), Experts(12), nn.Linear(12, 4)]


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 8, generator=g)
        yield x, x[:, :4].argmax(1)
