"""What a device can hold of a model within seconds and bytes: whole layers, at one price a layer."""

from __future__ import annotations

import numpy as np

from skyctl.planner.model import Array, Model

MARGIN = 1e-9


class Goods:
    """What each device can hold within a time: prices of layers, whole layers, memory.

    A layer's price is the least share of any device's time for everything; prices sum to 1 after scaling.
    ``rate[d]``: most price a second; ``least[d]``: least seconds of a stage with more than tiny layers, of
    which there are ``tiny``; ``forward``, ``backward``: their least shares of a layer's time.
    """

    def __init__(self, model: Model, most_s: float) -> None:
        self.model = model
        self.most_s = most_s
        times = np.stack([np.diff(model.work.array(d)) for d in range(model.devices)])
        whole = times.sum(axis=1)
        shares = np.divide(times, whole[:, None], out=np.zeros_like(times), where=whole[:, None] > 0)
        prices = shares.min(axis=0)
        total = float(prices.sum())
        self.prices = prices / total if total > 0 else prices
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(self.prices > 0, self.prices / times, 0.0)
        self.rate = np.where(np.isfinite(ratio), ratio, np.inf).max(axis=1)
        self.usable = bool(np.isfinite(self.rate).all() and (self.rate > 0).all())
        small = self.prices < 0.2 * float(np.median(self.prices))
        self.tiny = int(small.sum())
        self.least = times[:, ~small].min(axis=1)
        forward = np.stack([np.diff(model.forward.array(d)) for d in range(model.devices)])
        share = np.divide(forward, times, out=np.full_like(times, 0.5), where=times > 0)
        self.forward, self.backward = float(share.min()), float(1 - share.max())
        # all the price at the best rate there is
        best = float(self.rate.max())
        self.shortest = (1 - MARGIN) / best if self.usable else 0.0
        self._most: dict[tuple[int, float], float] = {}
        self._tables: dict[tuple[int, int], tuple[Array, Array]] = {}

    def most(self, device: int, cap_s: float) -> float:
        """The most price within that time, memory as in the last stage."""
        if (device, cap_s) not in self._most:
            times, masses = self._table(device, 1)
            at = int(np.searchsorted(times, cap_s * (1 + 1e-12), side="right"))
            self._most[device, cap_s] = float(masses[at])
        return self._most[device, cap_s]

    def gain(self, device: int, cap: Array, flying: int, mus: Array) -> Array:
        """max over t of (price − μ t), shape (caps, μ), for a stage that holds a layer."""
        times, masses = self._table(device, 1 if self.model.unlimited else flying)
        at = np.searchsorted(times, cap * (1 + 1e-12), side="right")
        mass = masses[at]
        rate, least = self.rate[device], self.least[device]
        most = np.maximum(mass / rate, least)
        net = rate - mus[None, :]
        out: Array = np.where(net >= 0, net * most[:, None], net * least)
        return out

    def _table(self, device: int, flying: int) -> tuple[Array, Array]:
        """(range times ascending, most price within each; one longer, the first 0)."""
        key = (device, flying)
        if key not in self._tables:
            model = self.model
            work = model.work.array(device)
            price = np.concatenate([[0.0], np.cumsum(self.prices)])
            times, masses = [], []
            for width in range(1, model.layers + 1):
                spent = work[width:] - work[:-width]
                fit = spent <= self.most_s * (1 + 1e-9)
                if not fit.any():
                    break
                if (
                    not model.unlimited
                ):  # a longer range may fit where a shorter one does not: receive windows
                    fit &= [bool(ok) and model.fits(device, p, p + width, flying) for p, ok in enumerate(fit)]
                times.append(spent[fit])
                masses.append((price[width:] - price[:-width])[fit])
            if times:
                time_s, mass = np.concatenate(times), np.concatenate(masses)
                order = np.argsort(time_s, kind="stable")
                table = time_s[order], np.concatenate([[0.0], np.maximum.accumulate(mass[order])])
            else:
                table = np.zeros(0), np.zeros(1)
            self._tables[key] = table
        return self._tables[key]
