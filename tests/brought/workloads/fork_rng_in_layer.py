"""Fixed noise under fork_rng with a seed, within a layer of a list."""

import torch
from torch import nn


class Noisy(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            noise = torch.randn(x.shape[1])
        return torch.tanh(self.linear(x) + 0.1 * noise)


def model():
    return [nn.Linear(8, 12), Noisy(12), Noisy(12), nn.Linear(12, 4)]


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 8, generator=g)
        yield x, x[:, :4].argmax(1)
