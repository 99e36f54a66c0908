"""The result of the published experiment: every size, in every execution, by every strategy."""

from __future__ import annotations

from typing import Literal

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
