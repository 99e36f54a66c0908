"""A language model whose head has the embedding's weight."""

import torch
from torch import nn


class Lm(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(20, 12), nn.Linear(12, 20, bias=False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.GELU()) for _ in range(3))
        self.head.weight = self.words.weight

    def forward(self, ids):
        x = self.words(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).transpose(1, 2)


def model():
    return Lm()


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        ids = torch.randint(0, 20, (batch_size, 7), generator=g)
        yield ids[:, :-1], ids[:, 1:]
