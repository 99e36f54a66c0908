"""set_grad_enabled by a flag: the first blocks are not trained."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, frozen=2):
        super().__init__()
        self.stem, self.head = nn.Linear(8, 12), nn.Linear(12, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.GELU()) for _ in range(4))
        self.frozen = frozen

    def forward(self, x):
        with torch.set_grad_enabled(self.frozen == 0):
            x = self.stem(x)
        for i, block in enumerate(self.blocks):
            with torch.set_grad_enabled(i >= self.frozen):
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
