"""What balance can save at most, as formulas: L equal layers, N devices, device d takes f_d seconds a layer.

An even split gives every device L/N layers; perfect balance gives device d a share in proportion to 1/f_d.
With A the arithmetic and H the harmonic mean of the f_d:

=====================  ===========  ================  ====================  =======================
one batch takes        even         perfect balance   the least there is    saved by perfect balance
=====================  ===========  ================  ====================  =======================
chain: Σ stages        L · A        L · H             L · min f             1 − H/A
pipeline: max stage    L/N · max f  L/N · H           L/N · H               1 − H/max f
=====================  ===========  ================  ====================  =======================

A chain is fastest where the fastest device holds everything (1 − min f/A is saved): balance is not what
makes it fast. With r = max f/min f, whatever the factors between: H/A ≥ 4r/(1+r)² (Kantorovich), so balance
saves a chain at most ((r−1)/(r+1))², reached where half the devices are slow; a pipeline saves less than
1 − 1/r, which many devices with one slow one among them come near to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple


class SlowdownFactors(NamedTuple):
    """A set of devices, by their factors' means and ends."""

    arithmetic: float
    harmonic: float
    least: float
    most: float

    @classmethod
    def of(cls, factors: Sequence[float]) -> SlowdownFactors:
        """Of the devices with these slowdown factors."""
        count = len(factors)
        harmonic = count / math.fsum(1 / f for f in factors)
        return cls(math.fsum(factors) / count, harmonic, min(factors), max(factors))

    @classmethod
    def uniform(cls, spread: float) -> SlowdownFactors:
        """Of very many devices, their factors uniform in [1, spread]."""
        harmonic = 1.0 if spread == 1 else (spread - 1) / math.log(spread)
        return cls((1 + spread) / 2, harmonic, 1.0, spread)

    @property
    def spread(self) -> float:
        """The slowest device's factor over the fastest's."""
        return self.most / self.least

    @property
    def balanced_chain(self) -> float:
        """Saved of a chain's time by perfect balance."""
        return 1 - self.harmonic / self.arithmetic

    @property
    def fastest_chain(self) -> float:
        """Saved of a chain's time where the fastest device holds everything: no plan saves more."""
        return 1 - self.least / self.arithmetic

    @property
    def pipeline(self) -> float:
        """Saved of a pipeline's time by perfect balance: no plan saves more."""
        return 1 - self.harmonic / self.most


def max_balanced_chain_saving(spread: float) -> float:
    """The most that perfect balance saves of a chain's time, over all sets of devices with that spread."""
    return ((spread - 1) / (spread + 1)) ** 2


def max_pipeline_saving(spread: float) -> float:
    """What no balance of a pipeline saves, whatever the devices with that spread."""
    return 1 - 1 / spread


def spread_needed(saved: Callable[[SlowdownFactors], float], reduction: float) -> float:
    """The spread from which on a rule saves that much of many uniform factors (bisection; up to 10⁶)."""
    low, high = 1.0, 1e6
    for _ in range(200):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if saved(SlowdownFactors.uniform(middle)) < reduction else (low, middle)
    return high
