"""Batches that are dicts, spread over forward's keywords, one of which is not needed."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.numbers, self.kinds = nn.Linear(8, 12), nn.Embedding(20, 12)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(12, 4)

    def forward(self, numbers, kinds, age=None, scale=1.0):
        x = self.numbers(numbers) + self.kinds(kinds) * scale
        for block in self.blocks:
            x = block(x)
        return self.head(x if age is None else x + age.unsqueeze(1))


def model():
    return Net()


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        x, age = torch.randn(batch_size, 8, generator=g), torch.rand(batch_size, generator=g)
        kinds = torch.randint(0, 20, (batch_size,), generator=g)
        yield {"numbers": x, "kinds": kinds, "age": age}, kinds % 4
