"""A VGG flattened into one sequence, with its in-place ReLUs and dropouts."""

import torch
from torch import nn


class Vgg(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(6, 6, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Linear(96, 12), nn.ReLU(True), nn.Dropout(0.0, True), nn.Linear(12, 4)
        )


def model():
    net = Vgg()
    return nn.Sequential(*net.features, nn.Flatten(1), *net.classifier)


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 3, 8, 8, generator=g)
        yield x, x[:, 0, 0, :4].argmax(1)
