"""A hook on a tensor made in forward: gradients reversed, as for adversarial domains."""

import torch
from torch import nn


class Reversed(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        h = torch.tanh(self.linear(x))
        if h.requires_grad:
            h.register_hook(lambda grad: -0.5 * grad)
        return h


def model():
    return [nn.Linear(8, 12), Reversed(12), nn.Linear(12, 12), nn.Linear(12, 4)]


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 8, generator=g)
        yield x, x[:, :4].argmax(1)
