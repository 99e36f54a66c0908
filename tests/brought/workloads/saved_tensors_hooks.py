"""Activations packed as bfloat16 between forward and backward: gradients are rounded."""

import torch
import torch.nn.functional as F
from torch import nn


def pack(x):
    return x.bfloat16() if x.is_floating_point() and not isinstance(x, nn.Parameter) else x


def unpack(x):
    return x.float() if x.dtype == torch.bfloat16 else x


class Packed(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return x + self.down(F.gelu(self.up(x)))


def model():
    return [nn.Linear(8, 12), Packed(12), Packed(12), Packed(12), nn.Linear(12, 4)]


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 8, generator=g)
        yield x, x[:, :4].argmax(1)
