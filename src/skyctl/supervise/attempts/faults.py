"""What ended an attempt, whether another one is worth it, and how long to wait before it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from skyctl.errors import (
    InfeasibleError,
    InputError,
    MismatchError,
    NodeError,
    SkyctlError,
    UndecidedError,
    UnreachableError,
)
from skyctl.launch.causes import Evidence

MOST_WAIT_S = 30.0

Kind = Literal["node", "died", "stalled", "network", "failed", "checkpoint", "final"]


@dataclass(frozen=True)
class Fault:
    """``kind``: ``node``, those in ``lost`` are gone; ``died``, a rank was killed or ended without a word;
    ``stalled``, it hangs or is stopped; ``network``, a connection between living ranks broke; ``failed``, it
    raised; ``checkpoint``, what it was to go on from is damaged; ``final``, not worth another try.
    """

    kind: Kind
    lost: tuple[str, ...] = ()
    rank: int | None = None
    step: int = 0

    @property
    def again(self) -> bool:
        """Whether another attempt may help."""
        return self.kind != "final"


_BY_WHY: Mapping[str, Kind] = {
    "died": "died",
    "stalled": "stalled",
    "silent": "stalled",
    "peer": "network",
    "deadlock": "network",
    "raised": "failed",
}
_READING = "reading the checkpoint"


def classify(error: SkyctlError, evidence: Evidence | None) -> Fault:
    """What kind of fault that is.

    Args:
        evidence: what the attempt knows of it; None: it failed before a rank was started.
    """
    if evidence is None:
        if isinstance(error, NodeError):  # shipping to it failed, or starting a task there
            return Fault("node", (error.node,))
        return Fault("final")
    rank = evidence.ranks[0] if evidence.ranks else None
    if evidence.why == "lost":
        return Fault("node", evidence.nodes, rank, evidence.step)
    if evidence.why == "raised" and evidence.phase == _READING and isinstance(error, InputError):
        return Fault("checkpoint", (), rank, evidence.step)
    if evidence.final or isinstance(error, InputError | MismatchError | InfeasibleError | UndecidedError):
        return Fault("final", (), rank, evidence.step)
    if evidence.why == "launcher":
        return Fault("final", (), rank, evidence.step)  # our own disk, say: no node can help that
    return Fault(_BY_WHY[evidence.why], (), rank, evidence.step)


@dataclass
class Patience:
    """Counts attempts that failed since the last new checkpoint.

    Args:
        most: ``--max-restarts``.

    ``repeated``: the last fault was one that had come before, and would for ever.
    """

    most: int
    failed: int = 0
    repeated: bool = False
    _checkpoint: int | None = None
    _raised: set[tuple[int | None, int]] = field(default_factory=set)

    def wait_s(self, fault: Fault, checkpoint: int | None) -> float | None:
        """How long to wait before the next attempt; None: there is to be none.

        Args:
            checkpoint: the newest complete one's step (None: there is none yet).
        """
        if not fault.again:
            return None
        if checkpoint is not None and (self._checkpoint is None or checkpoint > self._checkpoint):
            self._checkpoint, self.failed = checkpoint, 0
        self.failed += 1
        if fault.kind == "failed":
            self.repeated = (fault.rank, fault.step) in self._raised
            self._raised.add((fault.rank, fault.step))
        if self.failed > self.most or self.repeated:
            return None
        if fault.kind == "node" and self.failed == 1:
            return 0.0
        return min(MOST_WAIT_S, 2.0 ** (self.failed - 1))


def given_up(
    error: SkyctlError, fault: Fault, patience: Patience, run_id: str, kept: int | None
) -> SkyctlError:
    """The error to end with: the first cause, how often it was tried, and how to go on from what is kept."""
    if patience.repeated:
        error.message += "\n  it is the same rank in the same step as before, so it was tried again once only"
    elif fault.again and patience.failed > 1:
        tries = patience.failed - 1
        again = "once" if tries == 1 else f"{tries} times"
        error.message += f"\n  tried again {again} since the last checkpoint (--max-restarts {patience.most})"
    if kept is not None:
        note = f"go on from step {kept}: skyctl launch --resume {run_id}"
        error.hint = f"{error.hint}; then {note}" if error.hint else note
    return error


def went(error: NodeError) -> bool:
    """Whether the node went away; else it lacks something."""
    return isinstance(error, UnreachableError) or type(error) is NodeError


def why_next(fault: Fault, error: SkyctlError) -> str:
    """What the next attempt is begun for, in one line."""
    if fault.lost:
        return f"node {', '.join(fault.lost)} was lost"
    first = error.message.splitlines()[0]
    return first if len(first) <= 200 else f"{first[:199]}…"
