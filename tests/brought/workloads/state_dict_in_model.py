"""Weights loaded by load_state_dict within model()."""

import torch
import torch.nn.functional as F
from torch import nn


class Mlp(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 24), nn.Linear(24, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def weights(net):
    return {name: torch.arange(p.numel()).view(p.shape).sin() / 4 for name, p in net.state_dict().items()}


def model():
    net = nn.Sequential(nn.Linear(8, 12), Mlp(12), Mlp(12), nn.Linear(12, 4))
    net.load_state_dict(weights(net))
    return net


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 8, generator=g)
        yield x, x[:, :4].argmax(1)
