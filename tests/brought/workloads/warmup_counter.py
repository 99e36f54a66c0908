"""A residual weight that rises with the number of calls, counted in self."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(8, 12)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.SiLU()) for _ in range(3))
        self.head = nn.Linear(12, 4)
        self.seen = 0

    def forward(self, x):
        self.seen += 1
        x = self.stem(x)
        for block in self.blocks:
            x = x + min(self.seen / 50, 1.0) * block(x)
        return self.head(x)


def model():
    return Net()


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 8, generator=g)
        yield x, x[:, :4].argmax(1)
