"""A loss module with weights of its own, made at the file's top: nobody trains them."""

import torch
import torch.nn.functional as F
from torch import nn


class Uncertain(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_variance = nn.Parameter(torch.zeros(2))

    def forward(self, outputs, targets):
        both = torch.stack([F.cross_entropy(outputs, targets), outputs.square().mean()])
        return (both * torch.exp(-self.log_variance) + self.log_variance).sum()


loss = Uncertain()


def model():
    return nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 12), nn.GELU(), nn.Linear(12, 4))


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 8, generator=g)
        yield x, x[:, :4].argmax(1)
