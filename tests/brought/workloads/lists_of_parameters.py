"""Parameters in a ParameterList and a ParameterDict."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(torch.eye(12) * 0.5 for _ in range(4))
        self.scales = nn.ParameterDict({"in": torch.ones(12), "out": torch.ones(12)})
        self.stem, self.head = nn.Linear(8, 12), nn.Linear(12, 4)

    def forward(self, x):
        x = self.stem(x) * self.scales["in"]
        for w in self.weights:
            x = torch.tanh(x @ w)
        return self.head(x * self.scales["out"])


def model():
    return Net()


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 8, generator=g)
        yield x, x[:, :4].argmax(1)
