"""A forward hook on a container within the model, which is looked into."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(8, 12), nn.Linear(12, 4)
        self.body = nn.Sequential(*[nn.Sequential(nn.Linear(12, 12), nn.GELU()) for _ in range(4)])
        self.body.register_forward_hook(lambda module, args, output: output + args[0])

    def forward(self, x):
        return self.head(self.body(self.stem(x)))


def model():
    return Net()


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 8, generator=g)
        yield x, x[:, :4].argmax(1)
