"""nn.AdaptiveLogSoftmaxWithLoss as the last layer: the targets are one of the inputs."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, 12)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.ReLU()) for _ in range(3))
        self.softmax = nn.AdaptiveLogSoftmaxWithLoss(12, 20, cutoffs=[5, 12])

    def forward(self, ids, following):
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.softmax(x, following).output


def model():
    return Net()


def loss(outputs, targets):
    return -outputs.mean()


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        ids = torch.randint(0, 20, (batch_size,), generator=g)
        yield (ids, (ids * 7 + 3) % 20), ids
