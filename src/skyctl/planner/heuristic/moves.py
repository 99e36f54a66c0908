"""Random neighbours of a whole batch of plans, one kind of move a step, without leaving numpy.

The moves: layers handed from one stage to another (those between shift), two devices exchanged with their
numbers of layers or part of the difference, an unused device taken instead of another, two neighbouring
blocks of stages exchanged (a block of one: a stage moved), a block reversed, a stage dropped, an unused
device put in with a few layers. Arrays as in ``batch.py``.
"""

from __future__ import annotations

import numpy as np

from skyctl.planner.heuristic.plays import Ints

GIVE, HAND_ON, EXCHANGE, BLOCKS, REVERSE, DROP, INSERT = range(7)
WEIGHTS = (0.32, 0.10, 0.24, 0.18, 0.04, 0.05, 0.07)


class Moves:
    """Draws moves. ``most``: the most stages a plan may have."""

    def __init__(self, rng: np.random.Generator, most: int) -> None:
        self.rng = rng
        self.most = most
        self.kinds = np.cumsum(WEIGHTS)

    def propose(self, order: Ints, sizes: Ints) -> tuple[Ints, Ints]:
        """A neighbour of every plan (here and there the plan itself); new arrays where they differ."""
        kind = int(np.searchsorted(self.kinds, self.rng.random() * self.kinds[-1]))
        count = (sizes > 0).sum(axis=0)
        if kind in {GIVE, HAND_ON}:
            return order, self._give(sizes, count, near=kind == HAND_ON)
        if kind == EXCHANGE:
            return self._exchange(order, sizes, count)
        if kind == BLOCKS:
            return _taken(order, sizes, self._blocks(len(order), count))
        if kind == REVERSE:
            return _taken(order, sizes, self._reverse(len(order), count))
        return self._drop(order, sizes, count) if kind == DROP else self._insert(order, sizes, count)

    def _below(self, limit: Ints) -> Ints:
        """Uniform integers in [0, limit)."""
        return (self.rng.random(limit.shape) * limit).astype(np.intp)

    def _amount(self, limit: Ints) -> Ints:
        """1 half of the time, else up to about a tenth more than a few; at most ``limit``."""
        drawn = np.floor(self.rng.random(limit.shape) ** -0.7).astype(np.intp)
        return np.minimum(drawn, limit)

    def _give(self, sizes: Ints, count: Ints, *, near: bool) -> Ints:
        plans = np.arange(sizes.shape[1])
        giver = self._below(count)
        if near:
            taker = giver + np.where(self.rng.random(count.shape) < 0.5, 1, -1)
            taker = np.where((taker < 0) | (taker >= count), giver, taker)
        else:
            taker = self._below(count)
        given = np.maximum(0, self._amount(sizes[giver, plans] - 1))
        out = sizes.copy()
        out[giver, plans] -= given
        out[taker, plans] += given
        return out

    def _exchange(self, order: Ints, sizes: Ints, count: Ints) -> tuple[Ints, Ints]:
        plans = np.arange(sizes.shape[1])
        i = self._below(count)
        j = self._below(np.where(self.rng.random(count.shape) < 0.15, len(order), count))
        new, out = order.copy(), sizes
        new[i, plans], new[j, plans] = order[j, plans], order[i, plans]
        if self.rng.random() < 0.75:
            out = sizes.copy()
            have, other = sizes[i, plans], sizes[j, plans]
            share = self.rng.random(count.shape) if self.rng.random() < 0.5 else 1.0
            passed = np.where(other > 0, np.rint((other - have) * share).astype(np.intp), 0)
            out[i, plans] += passed
            out[j, plans] -= np.where(i == j, 0, passed)
        return new, out

    def _cuts(self, count: Ints) -> tuple[Ints, Ints]:
        """0 ≤ low < high ≤ count."""
        low = self._below(count)
        return low, low + 1 + self._below(count - low)

    def _blocks(self, rows: int, count: Ints) -> Ints:
        low, high = self._cuts(count)
        width = high - low
        shift = self._below(width)
        single = self.rng.random(count.shape)
        shift = np.where(single < 0.3, 1, np.where(single < 0.6, width - 1, shift))
        return _rotated(rows, low, high, shift)

    def _reverse(self, rows: int, count: Ints) -> Ints:
        low, high = self._cuts(count)
        r = np.arange(rows)[:, None]
        return np.where((r >= low) & (r < high), low + high - 1 - r, r)

    def _drop(self, order: Ints, sizes: Ints, count: Ints) -> tuple[Ints, Ints]:
        plans = np.arange(sizes.shape[1])
        i = self._below(count)
        taker = np.where(self.rng.random(count.shape) < 0.5, i + 1, i - 1)
        taker = np.where(self.rng.random(count.shape) < 0.3, self._below(count), taker)
        taker = np.where((taker < 0) | (taker >= count) | (taker == i), np.where(i > 0, 0, 1), taker)
        dropped = count > 1
        taker = np.where(dropped, taker, i)
        out = sizes.copy()
        given = np.where(dropped, sizes[i, plans], 0)
        out[i, plans] -= given
        out[taker, plans] += given
        end = np.where(dropped, len(order), i + 1)
        return _taken(order, out, _rotated(len(order), i, end, 1))

    def _insert(self, order: Ints, sizes: Ints, count: Ints) -> tuple[Ints, Ints]:
        rows = len(order)
        plans = np.arange(sizes.shape[1])
        can = count < min(rows, self.most)
        idle = np.where(can, count + self._below(np.maximum(rows - count, 1)), 0)
        at = np.where(can, self._below(count + 1), 0)
        new, out = _taken(order, sizes, _rotated(rows, at, idle + 1, idle - at))
        giver = np.where(self.rng.random(count.shape) < 0.5, at + 1, self._below(count + 1))
        giver = np.where(giver > count, at - 1, giver)
        giver = np.where(giver == at, np.where(at > 0, at - 1, at + 1), giver)
        giver = np.where(can, giver, 0)
        limit = out[giver, plans] - 1
        given = np.maximum(0, self._amount(limit))
        half = self.rng.random(count.shape) < 0.4
        given = np.where(half, self._below(np.maximum(limit, 0) + 1), given)
        given = np.where(can, given, 0)
        out[giver, plans] -= given
        out[at, plans] += given
        failed = can & (given == 0)
        if failed.any():  # nothing to give: leave the plan as it is
            new, out = np.where(failed, order, new), np.where(failed, sizes, out)
        return new, out


def _rotated(rows: int, low: Ints, high: Ints, shift: Ints | int) -> Ints:
    """Row indices with [low, high) rotated towards low by ``shift``."""
    r = np.arange(rows)[:, None]
    width = np.maximum(high - low, 1)
    turned = low + (r - low + shift) % width
    return np.where((r >= low) & (r < high), turned, r)


def _taken(order: Ints, sizes: Ints, index: Ints) -> tuple[Ints, Ints]:
    return np.take_along_axis(order, index, axis=0), np.take_along_axis(sizes, index, axis=0)
