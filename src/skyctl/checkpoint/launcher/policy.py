"""How often checkpoints are written, and which are kept so that one is always replicated. Pure.

Nodes keep the last few steps. If copying one takes longer than writing those, no step would ever be in
copies: each is pruned before its last layer has arrived. So one step at a time is copied to its end, and the
one before it is kept until then.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from skyctl.records.cluster import node_of
from skyctl.records.plan import Plan
from skyctl.records.problem import Problem
from skyctl.records.run_state import BestCheckpoint

SHARD_SIZE_FACTOR, SHARD_HEADER_BYTES = 2, 1 << 20
"""A layer's file holds no more than its state; twice that and a little more for what a count may miss, and
for names and shapes."""


def shard_limits(problem: Problem) -> dict[int, int]:
    """By layer, the most bytes that a file with its state can have, or one with its weights."""
    return {
        number: int(SHARD_SIZE_FACTOR * layer.state_bytes) + SHARD_HEADER_BYTES
        for number, layer in enumerate(problem.layers)
    }


@dataclass(frozen=True)
class CheckpointRules:
    """The user's settings for a run's checkpoints.

    Attributes:
        steps: that the run has.
        writes: whether its ranks write any.
        keep: checkpoints that are kept.
        replicas: on how many other nodes each file is to be.
    """

    steps: int
    writes: bool = True
    keep: int = 2
    replicas: int = 2

    @property
    def kept_steps(self) -> int:
        """How many checkpoints a node keeps: the newest may not be whole everywhere, so two at least."""
        return max(2, self.keep)


@dataclass
class RetentionPolicy:
    """Which checkpoints of a run no node may prune.

    Attributes:
        layers: how many the model has.
        newest: the newest step that every rank has written.
        replicated: the newest step of whose layers other nodes have copies, of all.
        copying: the step that is to be replicated next.
        unreplicated: no node copies from another.
        best: the one that every rank has written with the lowest validation loss.
        best_replicated: the last such one of whose layers other nodes have copies, of all.
        pinned_before: what an earlier supervisor has left pinned; kept until a step is replicated.
    """

    layers: int
    unreplicated: bool = True
    newest: int | None = None
    replicated: int | None = None
    copying: int | None = None
    best: BestCheckpoint | None = None
    best_replicated: BestCheckpoint | None = None
    pinned_before: frozenset[int] = frozenset()
    _copied: dict[int, set[int]] = field(default_factory=dict)

    @property
    def steps(self) -> list[int]:
        """The steps that no node may prune now, in ascending order."""
        kept = {step for step in (self.replicated, self.copying, self.newest) if step is not None}
        kept |= {best.step for best in (self.best, self.best_replicated) if best is not None}
        return sorted(kept | self.pinned_before if self.replicated is None else kept)

    def written(self, step: int, loss: float | None = None) -> None:
        """Every rank has written its layers after so many steps. ``loss``: of the validation before it."""
        self.newest = step
        if loss is not None and (self.best is None or loss < self.best.loss):
            self.best = BestCheckpoint(step=step, loss=loss)
        self._advance_best()
        if self.copying is None or self.unreplicated:
            self._advance()

    def copied(self, step: int, layers: Collection[int]) -> None:
        """Notes that another node has copies of these layers of the checkpoint after ``step`` steps."""
        self._copied.setdefault(step, set()).update(layers)
        self._advance_best()
        if step == self.copying:
            self._advance()

    def failed(self) -> None:
        """A node can't copy from another. The step it was at is not waited for."""
        self.copying = None
        self._advance()

    def writers_changed(self) -> None:
        """Others write from now on: what is not in copies yet may never be, and isn't waited for."""
        self.copying = None

    def restarted(self, step: int | None, whole: Collection[int] = ()) -> None:
        """Another attempt goes on from that step: what is newer is gone.

        Args:
            whole: the steps that are there in full.
        """
        bests = (best for best in (self.best, self.best_replicated) if best is not None)
        there = (best for best in bests if step is not None and best.step <= step and best.step in whole)
        self.best = self.best_replicated = next(there, None)
        self.newest = self.replicated = step
        self.copying = None
        self._copied.clear()

    def _advance_best(self) -> None:
        """The best one takes the place of that before once other nodes have copies of it."""
        best = self.best
        if best is not None and (self.unreplicated or len(self._copied.get(best.step, ())) == self.layers):
            self.best_replicated = best

    def _advance(self) -> None:
        """Moves on from a step whose layers are all copied to the newest one."""
        if self.unreplicated:
            self.replicated, self.copying = self.newest, None
            return
        for step in (self.copying, self.newest):
            if step is None or (self.replicated is not None and step <= self.replicated):
                continue
            if len(self._copied.get(step, ())) < self.layers:
                self.copying = step
                return
            self.replicated, self.copying = step, None
            best = self.best.step if self.best is not None else None
            self._copied = {n: had for n, had in self._copied.items() if n > step or n == best}


# How often a run writes a checkpoint where the user does not say. Pure.

CHECKPOINT_TIME_SHARE = 0.02
"""Of the training time that checkpoints may take."""
LONGEST_INTERVAL_S = 300.0
"""So much work may be lost at most: this goes before the share."""
WRITE_BYTES_PER_S = 150e6
LAYER_FILE_S = 0.01
"""The seconds that a layer's file costs beside its bytes: to synchronise and rename it."""
REPLICATION_LINK_SHARE = 0.25
"""Of a node's slowest link that its copies may take."""


def checkpoint_interval(plan: Plan, replicas: int) -> int:
    """Steps from one checkpoint to the next.

    Args:
        replicas: other nodes that get a copy of each.
    """
    problem, step_s = plan.problem, max(plan.predicted.iteration_s, 1e-6)
    writing = plan.pipelines[0].stages  # others hold the same layers
    state = [
        sum(layer.state_bytes for layer in problem.layers[stage.start : stage.stop]) for stage in writing
    ]
    files = [LAYER_FILE_S * (stage.stop - stage.start) for stage in writing]
    wait_s = (
        max(size / WRITE_BYTES_PER_S + more for size, more in zip(state, files, strict=True))
        / CHECKPOINT_TIME_SHARE
    )
    for stage, size in zip(writing, state, strict=True):
        node = node_of(stage.device)
        rates = [
            link.bandwidth_bytes_per_s
            for link in problem.links
            if node_of(link.source) == node != node_of(link.target)
        ]
        if rates and replicas:
            wait_s = max(wait_s, replicas * size / min(rates) / REPLICATION_LINK_SHARE)
    return max(1, math.floor(min(wait_s, LONGEST_INTERVAL_S) / step_s))
