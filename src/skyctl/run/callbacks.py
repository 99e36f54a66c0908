"""The events that a run tells whoever watches it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from skyctl.records.measurement import ValidationMeasurement
from skyctl.run.owner_figures import OwnerFigures


class Detached(KeyboardInterrupt):
    """The user who watches goes away, and the run is to go on without this process."""


@dataclass(frozen=True)
class StepProgress:
    """One finished step, with the validation that followed it where there was one.

    ``unit``: what people call it (``Rhythm.unit``). ``left_s``: the steps that remain at the pace so far
    (None on the first). ``learning_rate``: of the first rank that trains anything. ``grad_norm``: over all
    stages, before clipping; None without clipping. ``repeats``: how often its microbatches were made again
    (``--sync-format fixed32``). ``ahead``: with a parameter server, the most steps that any device was
    ahead of the slowest when it went on from this one. ``owners``: where a step is a round of several
    owners, what each did in it.
    """

    step: int
    steps: int
    loss: float
    iteration_s: float
    samples_per_s: float
    left_s: float | None
    learning_rate: float | None = None
    grad_norm: float | None = None
    repeats: int = 0
    ahead: int | None = None
    validation: ValidationMeasurement | None = None
    owners: Mapping[str, OwnerFigures] = field(default_factory=dict)
    unit: str = "step"


class RankOfNode(Protocol):
    """A rank of a plan or of a script, as far as its log needs to name it."""

    @property
    def rank(self) -> int:
        """The rank's number, from 0."""

    @property
    def node(self) -> str:
        """The name of the node that the rank runs on."""


@dataclass
class RunCallbacks:
    """Callbacks of a run; each may be left as it is. They are called from the launching thread.

    ``begun``: the ranks of a script run, and whoever wants may leave it to the background from now on.
    """

    phase: Callable[[str], None] = lambda _text: None
    begun: Callable[[], None] = lambda: None
    step: Callable[[StepProgress], None] = lambda _progress: None
    log: Callable[[RankOfNode, str], None] = lambda _rank, _text: None
    note: Callable[[str], None] = lambda _text: None
    warn: Callable[[str], None] = lambda _text: None
    interrupted: Callable[[], str] = lambda: "stop"
