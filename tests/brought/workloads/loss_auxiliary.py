"""A model with an auxiliary head on its middle (as Inception has), in training alone."""

import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU())
        self.second = nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU())
        self.aux, self.head = nn.Linear(12, 4), nn.Linear(12, 4)

    def forward(self, x):
        x = self.first(x)
        return {"logits": self.head(self.second(x)), "aux": self.aux(x)}


def model():
    return Net()


def loss(outputs, targets):
    return F.cross_entropy(outputs["logits"], targets) + 0.4 * F.cross_entropy(outputs["aux"], targets)


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 8, generator=g)
        yield x, x[:, :4].argmax(1)
