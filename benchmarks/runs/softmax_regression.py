"""Softmax regression by SGD in numpy: one client's local epochs, for several starts at once, and figures.

Weights are (inputs + 1, columns, classes): a model a column, its bias in the last row; inputs have a one
behind them. All models of a client see the same batches, so a step is two products of matrices for all of
them. Needs numpy alone, so that another environment can import it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
RATE = 0.01
BATCH = 10


def with_ones(inputs: NDArray[np.floating]) -> Floats:
    """Samples with a one behind each, which the bias is multiplied with."""
    return np.concatenate([inputs, np.ones((len(inputs), 1))], 1).astype(np.float32)


def train(
    inputs: Floats,
    targets: Floats,
    orders: Sequence[NDArray[np.int64]],
    start: Floats,
    mu: Floats,
    epochs: NDArray[np.int64],
) -> Floats:
    """The weights that a client makes of the round's: epochs of SGD with FedProx's term µ/2 · ‖w − w₀‖².

    Args:
        inputs: with ones, (samples, inputs + 1).
        targets: one-hot, (samples, classes).
        orders: by epoch, the samples' order; a last batch of less than ``BATCH`` is left out.
        start: w₀, by column.
        mu, epochs: by column; one that has made its epochs is left out of further steps.
    """
    found = start.copy()
    classes = start.shape[2]
    for number in range(int(epochs.max(initial=0))):
        going = np.flatnonzero(epochs > number)
        weights = found[:, going].reshape(len(start), -1)
        near = np.repeat(mu[going], classes)
        pulled = bool(near.any())
        to_start = near * start[:, going].reshape(len(start), -1)
        order = orders[number][: len(targets) // BATCH * BATCH]
        xs = inputs[order].reshape(-1, BATCH, inputs.shape[1])
        ys = targets[order].reshape(-1, BATCH, 1, classes)
        for x, y in zip(xs, ys, strict=True):
            error = (x @ weights).reshape(BATCH, len(going), classes)
            error -= error.max(-1, keepdims=True)
            np.exp(error, out=error)
            error /= error.sum(-1, keepdims=True)
            error -= y
            gradient = x.T @ error.reshape(BATCH, -1)
            gradient *= np.float32(1 / BATCH)
            if pulled:
                gradient += near * weights
                gradient -= to_start
            gradient *= np.float32(RATE)
            weights -= gradient
        found[:, going] = weights.reshape(len(start), len(going), classes)
    return found


def mean_loss(weights: Floats, inputs: Floats, labels: NDArray[np.int64]) -> NDArray[np.float64]:
    """By column, the mean cross-entropy over the samples."""
    outputs = _outputs(weights, inputs)
    largest = outputs.max(-1)
    total = np.log(np.exp(outputs - largest[..., None]).sum(-1)) + largest
    losses = total - outputs[np.arange(len(labels)), :, labels]
    found: NDArray[np.float64] = losses.mean(0, dtype=np.float64)
    return found


def accuracy(weights: Floats, inputs: Floats, labels: NDArray[np.int64]) -> NDArray[np.float64]:
    """By column, the share of samples whose class gets the largest output."""
    found: NDArray[np.float64] = (_outputs(weights, inputs).argmax(-1) == labels[:, None]).mean(0)
    return found


def _outputs(weights: Floats, inputs: Floats) -> Floats:
    return (inputs @ weights.reshape(len(weights), -1)).reshape(len(inputs), *weights.shape[1:])
