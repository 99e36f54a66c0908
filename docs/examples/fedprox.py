"""FedProx's experiment (Li et al. 2020, arXiv 1812.06127): softmax regression on synthetic(alpha, beta).

The data is what the authors' generator (github.com/litian96/FedProx) draws from numpy's seed ``draw``: 30
users, each with labels and inputs of its own kind, a tenth of them to test with. (Theirs shuffles each user's
samples, which are drawn independently.) Owners are users in their order: ``local-1`` is the first.

Clients and stragglers of a round follow from ``draw``, so launch it with ``--seed`` of the same value.
"""

import random
from functools import cache

import numpy as np
import torch
from torch import nn

from skyctl.schedule.rounds import clients_of_round

INPUTS, CLASSES = 60, 10


def model():
    layer = nn.Linear(INPUTS, CLASSES)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return [layer]


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.01)


def metrics(outputs, targets):
    return {"accuracy": (outputs.argmax(1) == targets).float().mean()}


def example(batch_size):
    return torch.zeros(batch_size, INPUTS), torch.zeros(batch_size, dtype=torch.int64)


def data(batch_size, seed, owner, alpha=1.0, beta=1.0, draw=0, users=30):
    inputs, targets = samples(alpha, beta, draw, users)[user_of(owner)][:2]
    for chosen in torch.from_numpy(epoch_order(len(targets), seed)).split(batch_size):
        yield inputs[chosen], targets[chosen]


def validation(batch_size, seed, owner, alpha=1.0, beta=1.0, draw=0, users=30):
    """Each test sample ``batch_size`` times: whole batches, whose mean is that of all test samples."""
    inputs, targets = samples(alpha, beta, draw, users)[user_of(owner)][2:]
    for chosen in torch.arange(len(targets)).repeat(batch_size).split(batch_size):
        yield inputs[chosen], targets[chosen]


def local_steps(
    owner, round_number, alpha=1.0, beta=1.0, draw=0, users=30, clients=10, epochs=20, stragglers=0.0
):
    """``epochs`` over the owner's data; of a share of the round's clients fewer, 1 to ``epochs`` - 1."""
    user = user_of(owner)
    chosen = clients_of_round(users, clients, draw, round_number)
    slow = random.Random(f"{draw}/{round_number}/slow").sample(chosen, round(stragglers * clients))
    if user in slow:
        epochs = random.Random(f"{draw}/{round_number}/{user}").randint(1, epochs - 1)
    return epochs * (len(samples(alpha, beta, draw, users)[user][1]) // 10)


def user_of(owner):
    return int(owner.rpartition("-")[2]) - 1


def epoch_order(count, seed):
    return np.random.default_rng(seed).permutation(count)


@cache
def samples(alpha, beta, draw, users):
    """By user: inputs and targets to train on, inputs and targets to test with (the last tenth)."""
    generator = np.random.RandomState(draw)
    counts = generator.lognormal(4, 2, users).astype(int) + 50
    kinds = generator.normal(0, alpha, users)
    centres = [generator.normal(centre, 1, INPUTS) for centre in generator.normal(0, beta, users)]
    spread = np.diag(np.arange(1, INPUTS + 1) ** -1.2)
    found = []
    for count, kind, centre in zip(counts, kinds, centres, strict=True):
        weights, bias = generator.normal(kind, 1, (INPUTS, CLASSES)), generator.normal(kind, 1, CLASSES)
        inputs = generator.multivariate_normal(centre, spread, count)
        targets = torch.from_numpy((inputs @ weights + bias).argmax(1))
        x, cut = torch.from_numpy(inputs).float(), int(0.9 * count)
        found.append((x[:cut], targets[:cut], x[cut:], targets[cut:]))
    return found
