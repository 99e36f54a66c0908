"""A layer that begins as a copy of another one's values, though it is trained by itself."""

import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(12, 12) for _ in range(3))
        self.stem, self.head = nn.Linear(8, 12), nn.Linear(12, 4)
        self.two.weight.data.copy_(self.one.weight.data)
        with torch.no_grad():
            self.three.weight.copy_(-self.one.weight)
            self.three.bias.copy_(self.one.bias)

    def forward(self, x):
        x = self.stem(x)
        for layer in (self.one, self.two, self.three):
            x = x + torch.tanh(layer(x))
        return self.head(x), self.one.weight, self.three.weight


def model():
    return Net()


def loss(outputs, targets):
    return F.cross_entropy(outputs[0], targets)


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 8, generator=g)
        yield x, x[:, :4].argmax(1)
