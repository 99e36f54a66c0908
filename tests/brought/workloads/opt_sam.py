"""SAM: a step that needs a closure, for it computes gradients twice."""

import torch
from torch import nn


def model():
    blocks = [nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(nn.Linear(8, 12), *blocks, nn.Linear(12, 4))


class Sam(torch.optim.Optimizer):
    def __init__(self, params, base, rho=0.05):
        super().__init__(params, {"rho": rho})
        self.base = base
        self.param_groups = base.param_groups

    @torch.no_grad()
    def step(self, closure):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["before"] = p.clone()
                p.add_(p.grad, alpha=0.05)
        with torch.enable_grad():
            closure()
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.state[p]["before"])
        self.base.step()


def optimizer(parameters):
    parameters = list(parameters)
    return Sam(parameters, torch.optim.SGD(parameters, lr=0.1))


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 8, generator=g)
        yield x, x[:, :4].argmax(1)
