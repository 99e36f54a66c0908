"""LARS as people write it: each tensor's step is scaled by its own norms."""

import torch
from torch import nn


def model():
    blocks = [nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(nn.Linear(8, 12), *blocks, nn.Linear(12, 4))


class Lars(torch.optim.Optimizer):
    def __init__(self, params, lr, momentum=0.9, trust=0.02):
        super().__init__(params, {"lr": lr, "momentum": momentum, "trust": trust})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                size, slope = p.norm(), p.grad.norm()
                scale = group["trust"] * size / slope if size > 0 and slope > 0 else 1.0
                state = self.state[p]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(p)
                state["momentum"].mul_(group["momentum"]).add_(p.grad * scale)
                p.sub_(group["lr"] * state["momentum"])


def optimizer(parameters):
    return Lars(parameters, lr=1.0)


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 8, generator=g)
        yield x, x[:, :4].argmax(1)
