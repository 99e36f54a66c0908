"""A global norm that is clipped by a hook before the optimizer's step."""

import torch
from torch import nn


def model():
    blocks = [nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(nn.Linear(8, 12), *blocks, nn.Linear(12, 4))


def optimizer(parameters):
    parameters = list(parameters)
    made = torch.optim.SGD(parameters, lr=1.0)

    def clip(optimizer, args, kwargs):
        nn.utils.clip_grad_norm_(parameters, 0.1)

    made.register_step_pre_hook(clip)
    return made


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 8, generator=g)
        yield x, x[:, :4].argmax(1)
