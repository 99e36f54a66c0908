"""A method under the decorator @torch.no_grad(): the targets of a self-supervised loss."""

import torch
import torch.nn.functional as F
from torch import nn


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU())
        self.predictor = nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 12))

    @torch.no_grad()
    def wanted(self, x):
        return F.normalize(self.encoder(x + 0.1), dim=1)

    def forward(self, x):
        return F.normalize(self.predictor(self.encoder(x)), dim=1), self.wanted(x)


def model():
    return Siamese()


def loss(outputs, targets):
    return 2 - 2 * (outputs[0] * outputs[1]).sum(1).mean()


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 8, generator=g)
        yield x, x[:, :4].argmax(1)
