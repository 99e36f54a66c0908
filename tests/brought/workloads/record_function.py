"""Named parts for the profiler, around blocks and within them."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import record_function


class Named(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        with record_function("linear"):
            x = x + self.linear(x)
        return F.gelu(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(8, 12), nn.Linear(12, 4)
        self.blocks = nn.ModuleList(Named(12) for _ in range(3))

    def forward(self, x):
        with record_function("stem"):
            x = self.stem(x)
        for i, block in enumerate(self.blocks):
            with record_function(f"block {i}"):
                x = block(x)
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
