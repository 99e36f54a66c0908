"""What many ranges of layers need in memory, at once: ``Model.need_bytes`` in numpy."""

from __future__ import annotations

import numpy as np

from skyctl.planner.heuristic.plays import Array, Ints
from skyctl.planner.model import Model


class Room:
    """The tables of one problem. ``plain``: only state and activations count."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.state = np.array(model.state)
        self.activation = np.array(model.activation)
        self.output = np.array([0.0, *model.output[:-1], 0.0])
        self.workspace = _workspace(model)
        self.plain = self.workspace is None and not model.window

    def need(self, start: Ints, stop: Ints) -> tuple[Array, Array]:
        """(bytes whatever is in flight, bytes per microbatch in flight) of [start, stop)."""
        fixed = self.state.take(stop) - self.state.take(start)
        kept = self.activation.take(stop) - self.activation.take(start)
        if self.workspace is not None:
            width = len(self.state)
            level = np.frexp(np.maximum(stop - start, 1))[1] - 1
            half = np.maximum(stop - (1 << level), 0)
            first, second = level * width + start, level * width + half
            fixed += np.maximum(self.workspace.take(first), self.workspace.take(second))
        if self.model.window:
            fixed += self.model.window * (self.output.take(start) + self.output.take(stop))
        return fixed, kept


def _workspace(model: Model) -> Array | None:
    """A sparse table of range maxima, shape (levels, layers + 1); None where no layer needs any."""
    sizes = [layer.workspace_bytes for layer in model.problem.layers]
    if not any(sizes):
        return None
    tables = [np.array([*sizes, 0.0])]
    while 2 ** len(tables) <= model.layers:
        half = 2 ** (len(tables) - 1)
        below = tables[-1]
        above = below.copy()
        above[:-half] = np.maximum(below[:-half], below[half:])
        tables.append(above)
    return np.array(tables)
