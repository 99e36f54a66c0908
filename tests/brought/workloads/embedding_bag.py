"""Bags of categories, with weights for each of them."""

import torch
from torch import nn


class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.EmbeddingBag(20, 12, mode="sum")
        self.blocks = nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU())
        self.head = nn.Linear(12, 4)

    def forward(self, ids, weights):
        return self.head(self.blocks(self.words(ids, per_sample_weights=weights)))


def model():
    return Bags()


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        ids = torch.randint(0, 20, (batch_size, 5), generator=g)
        yield (ids, torch.rand(batch_size, 5, generator=g)), ids[:, 0] % 4
