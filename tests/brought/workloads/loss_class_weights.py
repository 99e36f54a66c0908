"""A loss object at the file's top, with class weights and label smoothing."""

import torch
from torch import nn

CRITERION = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5, 1.5]), label_smoothing=0.1)


def model():
    return nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 12), nn.GELU(), nn.Linear(12, 4))


def loss(outputs, targets):
    return CRITERION(outputs, targets)


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 8, generator=g)
        yield x, x[:, :4].argmax(1)
