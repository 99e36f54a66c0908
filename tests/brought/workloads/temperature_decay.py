"""A temperature that falls a little at each call in training."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(8, 12)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.ReLU()) for _ in range(3))
        self.head = nn.Linear(12, 4)
        self.temperature = 4.0

    def forward(self, x):
        if self.training:
            self.temperature = max(0.5, self.temperature * 0.95)
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x) / self.temperature


def model():
    return Net()


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 8, generator=g)
        yield x, x[:, :4].argmax(1)
