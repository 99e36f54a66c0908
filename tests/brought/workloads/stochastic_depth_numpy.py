"""Stochastic depth by NumPy's random in the forward of the whole model."""

import numpy as np
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, keep=0.5):
        super().__init__()
        self.stem, self.head, self.keep = nn.Linear(8, 12), nn.Linear(12, 4), keep
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.GELU()) for _ in range(4))

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            if not self.training or np.random.rand() < self.keep:
                x = x + block(x)
        return self.head(x)


def model():
    return Net()


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 8, generator=g)
        yield x, x[:, :4].argmax(1)
