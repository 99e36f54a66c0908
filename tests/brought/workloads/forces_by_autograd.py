"""Forces as the gradient of an energy with respect to the inputs, within forward."""

import torch
import torch.nn.functional as F
from torch import nn


class Potential(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.energy = nn.Linear(8, 12), nn.Linear(12, 1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.Softplus()) for _ in range(3))

    def forward(self, places):
        with torch.enable_grad():
            places = places.requires_grad_(True)
            h = self.stem(places)
            for block in self.blocks:
                h = block(h)
            energy = self.energy(h).sum()
            return -torch.autograd.grad(energy, places, create_graph=True)[0]


def model():
    return Potential()


def loss(outputs, targets):
    return F.mse_loss(outputs, targets)


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 8, generator=g)
        yield x, -x
