"""A hook on every module of the process: it caps all activations."""

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook


def capped(module, args, output):
    return output.clamp(-0.5, 0.5) if isinstance(output, torch.Tensor) else output


def model():
    register_module_forward_hook(capped)
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 4))


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 8, generator=g)
        yield x, x[:, :4].argmax(1)
