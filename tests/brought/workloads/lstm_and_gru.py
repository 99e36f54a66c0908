"""An LSTM and a GRU one after the other; the first one's last state starts the second."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, 12)
        self.first = nn.LSTM(12, 12, batch_first=True)
        self.second = nn.GRU(12, 12, batch_first=True, bidirectional=False)
        self.head = nn.Linear(12, 4)

    def forward(self, ids):
        x, (h, c) = self.first(self.words(ids))
        x, h = self.second(x, h)
        return self.head(x[:, -1])


def model():
    return Net()


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        ids = torch.randint(0, 20, (batch_size, 6), generator=g)
        yield ids, ids[:, 0] % 4
