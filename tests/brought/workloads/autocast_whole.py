"""Mixed precision written into forward, over all of it."""

import torch
import torch.nn.functional as F
from torch import nn


class Mlp(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 24), nn.Linear(24, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(8, 12)
        self.layers = nn.ModuleList(Mlp(12) for _ in range(3))
        self.out = nn.Linear(12, 4)

    def forward(self, x):
        with torch.autocast(device_type="cpu", dtype=torch.bfloat16):
            x = self.embed(x)
            for layer in self.layers:
                x = layer(x)
            logits = self.out(x)
        return logits.float()


def model():
    return Net()


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 8, generator=g)
        yield x, x[:, :4].argmax(1)
