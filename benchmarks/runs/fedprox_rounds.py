"""FedProx's experiment in one process, all methods side by side, by the draws of its workload script."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from runs.softmax_regression import BATCH, Floats, accuracy, mean_loss, train, with_ones
from skyctl.schedule.rounds import clients_of_round

SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "examples" / "fedprox.py"


class Method(NamedTuple):
    """How clients work: their µ, the share of stragglers, and whether the work of these is dropped."""

    name: str
    stragglers: float
    mu: float
    drop: bool

    @property
    def label(self) -> str:
        """As in ``fedavg 90%``."""
        return f"{self.name} {self.stragglers:.0%}"


METHODS = tuple(
    Method(name, stragglers, mu, drop)
    for stragglers in (0.0, 0.5, 0.9)
    for name, mu, drop in (("fedavg", 0.0, True), ("fedprox 0", 0.0, False), ("fedprox 1", 1.0, False))
    if stragglers or name != "fedavg"
)
"""Without stragglers FedAvg is FedProx with µ = 0."""


class Work(NamedTuple):
    """One client's work in a round: who, its epochs by method (0: dropped), and their samples' orders."""

    client: int
    epochs: NDArray[np.int64]
    orders: list[NDArray[np.int64]]


@dataclass(frozen=True)
class Federation:
    """The script's users and draws.

    Attributes:
        draw: the generator's seed, the run's as well.
    """

    alpha: float
    beta: float
    draw: int
    users: int = 30
    clients: int = 10
    epochs: int = 20
    script: Any = field(default_factory=lambda: load_script(SCRIPT), repr=False, compare=False)

    @cached_property
    def samples(self) -> list[tuple[Floats, NDArray[np.int64], Floats, NDArray[np.int64]]]:
        """By user, inputs (with ones) and labels to train on, and to test with."""
        given = self.script.samples(self.alpha, self.beta, self.draw, self.users)
        return [
            (with_ones(x.numpy()), y.numpy(), with_ones(tx.numpy()), ty.numpy()) for x, y, tx, ty in given
        ]

    def batches(self, client: int) -> int:
        """Of an epoch."""
        return len(self.samples[client][1]) // BATCH

    def round_of(self, number: int, methods: Sequence[Method]) -> Iterator[Work]:
        """Yields the work of each of the round's clients."""
        for client in clients_of_round(self.users, self.clients, self.draw, number):
            count = len(self.samples[client][1])
            made = np.array([self._epochs_of(client, number, method) for method in methods])
            first = self.draw + number * self.epochs  # local step j of round r is step r · H + j of its data
            orders = [self.script.epoch_order(count, first + epoch) for epoch in range(made.max(initial=0))]
            yield Work(client, made, orders)

    def _epochs_of(self, client: int, number: int, method: Method) -> int:
        steps = self.script.local_steps(
            f"user-{client + 1}",
            number,
            self.alpha,
            self.beta,
            self.draw,
            self.users,
            self.clients,
            self.epochs,
            method.stragglers,
        )
        made: int = steps // self.batches(client)
        return 0 if method.drop and made < self.epochs else made


@dataclass
class History:
    """By round and method, after the round's average.

    Attributes:
        accuracy, test_loss: on all users' test samples together.
        loss: the mean over their training samples.
        weights: of the last round.
        seconds: that all methods took.
    """

    accuracy: NDArray[np.float64]
    test_loss: NDArray[np.float64]
    loss: NDArray[np.float64]
    weights: Floats
    seconds: float


def load_script(path: Path) -> Any:
    """The workload script as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def simulate(federation: Federation, rounds: int, methods: Sequence[Method] = METHODS) -> History:
    """Plays the rounds; averages are weighted by the samples that each client has trained on."""
    samples = federation.samples
    classes = federation.script.CLASSES
    one_hot = [np.eye(classes, dtype=np.float32)[labels] for _, labels, _, _ in samples]
    trained, labels, tested, test_labels = (np.concatenate(parts) for parts in zip(*samples, strict=True))
    mu = np.array([method.mu for method in methods], np.float32)
    weights: Floats = np.zeros((trained.shape[1], len(methods), classes), np.float32)
    shape = (rounds, len(methods))
    found = History(np.zeros(shape), np.zeros(shape), np.zeros(shape), weights, 0.0)
    began = time.perf_counter()
    for number in range(rounds):
        total = np.zeros(weights.shape)
        counts = np.zeros(len(methods))
        for work in federation.round_of(number, methods):
            inputs = samples[work.client][0]
            made = train(inputs, one_hot[work.client], work.orders, weights, mu, work.epochs)
            count = work.epochs * federation.batches(work.client) * BATCH
            total += made * count[:, None]
            counts += count
        weights = np.where(counts[:, None] > 0, total / np.maximum(counts, 1)[:, None], weights)
        weights = weights.astype(np.float32)
        found.accuracy[number] = accuracy(weights, tested, test_labels)
        found.test_loss[number] = mean_loss(weights, tested, test_labels)
        found.loss[number] = mean_loss(weights, trained, labels)
    found.weights, found.seconds = weights, time.perf_counter() - began
    return found
