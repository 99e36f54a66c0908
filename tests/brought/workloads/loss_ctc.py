"""Connectionist temporal classification, with lengths as numbers a sample."""

import torch
import torch.nn.functional as F
from torch import nn


def model():
    return [nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 6), nn.LogSoftmax(-1)]


def loss(outputs, targets):
    labels, lengths = targets
    frames = torch.full((len(outputs),), outputs.shape[1])
    return F.ctc_loss(outputs.transpose(0, 1), labels, frames, lengths, zero_infinity=True)


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 9, 8, generator=g)
        labels = torch.randint(1, 6, (batch_size, 3), generator=g)
        yield x, (labels, torch.randint(1, 4, (batch_size,), generator=g))
