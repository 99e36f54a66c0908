"""The same in an ordinary model, with a padding index."""

import torch
from torch import nn


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, 12, padding_idx=0, max_norm=0.5, norm_type=2.0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(12, 4)

    def forward(self, ids):
        x = self.words(ids).mean(1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def model():
    return Classifier()


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        ids = torch.randint(0, 20, (batch_size, 6), generator=g)
        yield ids, ids[:, 0] % 4
