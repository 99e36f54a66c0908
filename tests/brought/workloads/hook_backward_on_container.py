"""A full backward hook on a sequence in a model: it scales what goes back to the stem."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(8, 12)
        self.body = nn.Sequential(*[nn.Sequential(nn.Linear(12, 12), nn.GELU()) for _ in range(4)])
        self.head = nn.Linear(12, 4)
        self.body.register_full_backward_hook(lambda module, into, out: (into[0] * 0.2,))

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
