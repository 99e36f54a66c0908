"""The figures and words that a page shows of one run, in training and after: not how they are drawn."""

from __future__ import annotations

from dataclasses import dataclass

from skyctl.records.interval import Interval
from skyctl.records.run_state import ENDED, RunState


@dataclass(frozen=True)
class SeriesPoint:
    """The mean of a figure over some steps in a row. ``step``: their middle, counted from 1."""

    step: float
    value: float


@dataclass(frozen=True)
class DeviceTimes:
    """How one device spent its newest ``steps`` steps: seconds of a step, on average.

    ``transfer_s``: it waited for the network; ``idle_s``: for other devices. ``predicted_share``: which part
    of a step it computes by the plan, 0 to 1; None where the plan does not say.
    """

    device: str
    compute_s: float
    transfer_s: float
    idle_s: float
    steps: int = 1
    predicted_share: float | None = None

    @property
    def step_s(self) -> float:
        """The whole step."""
        return self.compute_s + self.transfer_s + self.idle_s


@dataclass(frozen=True)
class RunNote:
    """One message of a run's supervisor. ``at``: when (ISO), or empty; ``kind``: ``note``, ``warning``, …"""

    at: str
    kind: str
    text: str


@dataclass(frozen=True)
class RunFigures:
    """A run at one moment.

    Attributes:
        status: one word; the state's own, or ``unsupervised`` where no process supervises the run.
        detail: what there is to say about the status, or None.
        unit: what people call a step (``Rhythm.unit``).
        loss, validation, seconds: by step; of ``seconds`` each attempt's first step, a warm-up, is left out.
        point_steps: how many steps a point of ``loss`` and ``seconds`` is the mean of, at most.
        last_loss: of the newest step; None before the first.
        pace_s: a step's seconds, the median of the newest; None where none but warm-ups have ended.
        samples_per_s: at the newest step; None where it is not known.
        left_s: seconds that the steps left take at the pace of the newest; None where that is not known.
        predicted_s, interval: the plan's step, and where it may lie.
        devices: in the order of ranks; empty where nothing is known yet.
        notes: the newest last.
    """

    state: RunState
    status: str
    detail: str | None
    unit: str
    loss: tuple[SeriesPoint, ...] = ()
    validation: tuple[SeriesPoint, ...] = ()
    seconds: tuple[SeriesPoint, ...] = ()
    point_steps: int = 1
    last_loss: float | None = None
    pace_s: float | None = None
    samples_per_s: float | None = None
    left_s: float | None = None
    predicted_s: float | None = None
    interval: Interval | None = None
    devices: tuple[DeviceTimes, ...] = ()
    notes: tuple[RunNote, ...] = ()

    @property
    def ended(self) -> bool:
        """Whether the run is over."""
        return self.state.status in ENDED
