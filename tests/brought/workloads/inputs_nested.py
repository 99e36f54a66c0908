"""A batch in tuples and dicts, taken as one value by the first layer of a list."""

import torch
from torch import nn


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.word = nn.Linear(8, 12), nn.Embedding(20, 12)

    def forward(self, batch):
        (image, mask), words = batch["seen"], batch["read"]
        return {"x": self.image(image * mask) + self.word(words), "mask": mask}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, value):
        gate = value["mask"].mean(1, keepdim=True)
        return {"x": torch.relu(self.linear(value["x"])) * gate, "mask": value["mask"]}


class Last(nn.Linear):
    def forward(self, value):
        return super().forward(value["x"])


def model():
    return [First(), Block(), Block(), Last(12, 4)]


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        words = torch.randint(0, 20, (batch_size,), generator=g)
        image, mask = torch.randn(batch_size, 8, generator=g), torch.rand(batch_size, 8, generator=g)
        yield {"seen": (image, mask.round()), "read": words}, words % 4
