"""One encoder for both of two inputs, and their distance (a Siamese net)."""

import torch
from torch import nn


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU())
        self.head = nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 2))

    def forward(self, a, b):
        return self.head((self.encoder(a) - self.encoder(b)).abs())


def model():
    return Siamese()


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        a, b = torch.randn(2, batch_size, 8, generator=g)
        yield (a, b), (a[:, 0] > b[:, 0]).long()
