"""The callbacks that inform whoever watches a sweep, and how it ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from skyctl.records.sweep import TrialState


@dataclass
class SweepCallbacks:
    """The callbacks that inform whoever watches a sweep; each is called from the thread that runs it."""

    phase: Callable[[str], None] = lambda _: None
    warn: Callable[[str], None] = lambda _: None
    changed: Callable[[TrialState], None] = lambda _: None


@dataclass(frozen=True)
class SweepOutcome:
    """How a sweep has ended. ``lost``: by node, why it was left out; ``seconds``: of this command."""

    trials: Sequence[TrialState]
    best: TrialState | None
    lost: Mapping[str, str]
    seconds: float
