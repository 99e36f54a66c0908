"""The published experiment's result: every size, execution and strategy; what balance can save at most."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from pydantic import Field

from skyctl.records.base import Count, FileRecord, Record, Seconds, Seq

PUBLISHED_REDUCTION = 0.55
"""The published reduction of training time, at 64 nodes and 160 encoders."""

Execution = Literal["chain", "chain-sum", "steady", "step"]
"""``chain``: one batch at a time through all stages and back, as published: the sum of the stages;
cut as published, for the least slowest stage. ``chain-sum``: the same, cut for the least sum. ``steady``:
pipelined, fill and drain left out: a batch takes what the slowest stage takes. ``step``: pipelined, one batch
in microbatches of a sample, fill and drain included.
"""

PaperStrategy = Literal["even", "dynamic", "heuristic", "optimal"]
"""``dynamic``: the published heuristic. ``heuristic`` and ``optimal``: ours."""


class PaperEntry(Record):
    """One strategy. ``time_s``: of one batch, in that execution; ``reduction``: 1 − time / even's time.

    ``status``, ``gap``: of the plan in the objective it was made for (None: no bound is claimed).
    ``plan_s``: wall seconds that planning took, which differ from run to run.
    """

    strategy: PaperStrategy
    time_s: Seconds
    reduction: float
    stages: Count
    status: Literal["optimal", "bounded", "feasible"]
    gap: float | None
    plan_s: Seconds


class PaperCase(Record):
    """One size, run in one way. ``workers``: nodes without the coordinator, which holds no layers.

    ``limit``: the reduction that a closed form allows (``chain``: that perfect balance gives).
    """

    nodes: Count
    workers: Count
    encoders: Count
    layers: Count
    execution: Execution
    limit: float
    entries: Seq[PaperEntry]

    def entry(self, strategy: str) -> PaperEntry:
        """The entry of a strategy (StopIteration where there is none)."""
        return next(entry for entry in self.entries if entry.strategy == strategy)


class MemoryLimitRow(Record):
    """The least sum at the largest size with ``scale`` of a card a device (None: without limit)."""

    scale: float | None
    reduction: float
    stages: Count
    gap: float | None


class PaperResult(FileRecord):
    """``skyctl compare --paper --json``. ``wall_s``: of the whole experiment.

    ``factors``: by name of a set of workers, how many times as long each takes.
    """

    kind: Literal["skyctl/paper"] = "skyctl/paper"
    version: Literal[1] = 1
    published_reduction: float = PUBLISHED_REDUCTION
    factors: dict[str, Seq[float]]
    cases: Seq[PaperCase]
    memory: Seq[MemoryLimitRow]
    files: dict[str, str] = Field(default_factory=dict)
    wall_s: Seconds

    def case(self, nodes: int, encoders: int, execution: str) -> PaperCase:
        """The case of a size and an execution (StopIteration where there is none)."""
        wanted = (nodes, encoders, execution)
        return next(c for c in self.cases if (c.nodes, c.encoders, c.execution) == wanted)


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
    """The saving that no balance of a pipeline exceeds, whatever the devices with that spread."""
    return 1 - 1 / spread


def spread_needed(saved: Callable[[SlowdownFactors], float], reduction: float) -> float:
    """The spread from which on a rule saves that much of many uniform factors (bisection; up to 10⁶)."""
    low, high = 1.0, 1e6
    for _ in range(200):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if saved(SlowdownFactors.uniform(middle)) < reduction else (low, middle)
    return high
