"""Lookahead: slow weights that follow those of another optimizer every few steps."""

import torch
from torch import nn


def model():
    blocks = [nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(nn.Linear(8, 12), *blocks, nn.Linear(12, 4))


class Lookahead(torch.optim.Optimizer):
    def __init__(self, base, k=3, alpha=0.5):
        self.base, self.k, self.alpha, self.count = base, k, alpha, 0
        super().__init__(base.param_groups, {})
        self.slow = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]

    @torch.no_grad()
    def step(self):
        self.base.step()
        self.count += 1
        if self.count % self.k == 0:
            for group, slow in zip(self.param_groups, self.slow):
                for p, kept in zip(group["params"], slow):
                    kept.lerp_(p, self.alpha)
                    p.copy_(kept)


def optimizer(parameters):
    return Lookahead(torch.optim.SGD(parameters, lr=0.3))


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 8, generator=g)
        yield x, x[:, :4].argmax(1)
