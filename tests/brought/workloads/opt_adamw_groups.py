"""AdamW with weight decay for matrices alone, grouped by name."""

import torch
from torch import nn


def model():
    blocks = [nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(nn.Linear(8, 12), *blocks, nn.Linear(12, 4))


def optimizer(parameters, named):
    decayed = [p for name, p in named if name.endswith("weight")]
    others = [p for name, p in named if not name.endswith("weight")]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.02, betas=(0.9, 0.95))


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 8, generator=g)
        yield x, x[:, :4].argmax(1)
