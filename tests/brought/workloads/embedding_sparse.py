"""A sparse embedding trained by SGD together with dense layers."""

import torch
from torch import nn


class Pooled(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.out = nn.Linear(width, 4)

    def forward(self, x):
        return self.out(x.mean(1))


def model():
    return [nn.Embedding(20, 12, sparse=True), nn.Linear(12, 12), nn.ReLU(), Pooled(12)]


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        ids = torch.randint(0, 20, (batch_size, 6), generator=g)
        yield ids, ids[:, 0] % 4
