"""A forward that returns early where a value is large."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(8, 12), nn.Linear(12, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.GELU()) for _ in range(3))

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            if x.abs().mean() > 2:
                return self.head(x)
            x = block(x)
        return self.head(x)


def model():
    return Net()


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 8, generator=g)
        yield x, x[:, :4].argmax(1)
