"""A loss with the (micro)batch's variance and covariance in it (VICReg)."""

import torch
import torch.nn.functional as F
from torch import nn


def model():
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 8))


def loss(outputs, targets):
    centred = outputs - outputs.mean(0)
    spread = F.relu(1 - (centred.var(0) + 1e-4).sqrt()).mean()
    covariance = centred.T @ centred / len(outputs)
    away = (covariance - covariance.diag().diag()).square().sum() / 8
    return F.mse_loss(outputs, targets) + spread + 0.1 * away


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 8, generator=g)
        yield x, x.roll(1, 1)
