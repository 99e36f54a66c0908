"""Mixed precision with a part in it that switches it off: a norm in float32."""

import torch
from torch import nn


class UnitNorm(nn.Module):
    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            x = x.float()
            return x * torch.rsqrt((x @ x.T).diagonal().unsqueeze(1) + 1e-6)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm, self.head = nn.Linear(8, 12), UnitNorm(), nn.Linear(12, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.GELU()) for _ in range(3))

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.stem(x)
            for layer in self.layers:
                x = self.norm(layer(x))
        return self.head(x)


def model():
    return Net()


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 8, generator=g)
        yield x, x[:, :4].argmax(1)
