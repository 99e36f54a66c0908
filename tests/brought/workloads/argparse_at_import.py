"""A script whose options are read by argparse when it is imported."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--hidden", type=int, default=12)
parser.add_argument("--lr", type=float, default=0.1)
args = parser.parse_args()


def model():
    return nn.Sequential(nn.Linear(8, args.hidden), nn.ReLU(), nn.Linear(args.hidden, 4))


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=args.lr)


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 8, generator=g)
        yield x, x[:, :4].argmax(1)
