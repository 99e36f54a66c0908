"""Residuals added in place, and a skip that is changed in place after it was kept."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(8, 12), nn.Linear(12, 4)
        parts = [(nn.Linear(12, 12), nn.ReLU(True), nn.Linear(12, 12)) for _ in range(4)]
        self.blocks = nn.ModuleList(nn.Sequential(*part) for part in parts)

    def forward(self, x):
        x = self.stem(x)
        skip = x
        for block in self.blocks:
            y = block(torch.tanh_(x + 1))
            y += x
            x = y
        skip *= 2
        return self.head(x + skip)


def model():
    return Net()


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 8, generator=g)
        yield x, x[:, :4].argmax(1)
