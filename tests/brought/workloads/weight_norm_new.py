"""Weight norm as a parametrization, in a model's convolutions over time."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm


class Tcn(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(weight_norm(nn.Conv1d(12 if i else 8, 12, 3, padding=1)) for i in range(3))
        self.head = nn.Linear(12, 4)

    def forward(self, x):
        for conv in self.convs:
            x = F.relu(conv(x))
        return self.head(x[..., -1])


def model():
    return Tcn()


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 8, 6, generator=g)
        yield x, x[:, :4, -1].argmax(1)
