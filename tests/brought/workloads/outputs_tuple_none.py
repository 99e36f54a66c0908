"""A forward that gives a tuple with None in it, as (logits, None)."""

import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(8, 12), nn.Linear(12, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.GELU()) for _ in range(3))

    def forward(self, x, targets=None):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return logits, None if targets is None else F.cross_entropy(logits, targets)


def model():
    return Net()


def loss(outputs, targets):
    return F.cross_entropy(outputs[0], targets)


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 8, generator=g)
        yield x, x[:, :4].argmax(1)
