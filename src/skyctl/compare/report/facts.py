"""What the report shows, gathered by ``control/reporting.py``: names as they may be read by anybody."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from skyctl.compare.rows import Outcome, Row
from skyctl.compare.sweeps import Sweep
from skyctl.compare.timeline import Timeline
from skyctl.records.plan import Plan


@dataclass(frozen=True)
class Machine:
    """One device. ``what``: processor, threads, emulated slowdown, in words.

    ``samples_per_s``: of the whole model, were it alone and had it the memory. ``spread``: (p90 − p10) /
    median of its layers' times, the middle one of them.
    """

    device: str
    label: str
    what: str
    samples_per_s: float | None
    spread: float | None
    memory_bytes: float | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class LinkCell:
    """One direction. ``words``: rate and latency, or why there are none; ``shade`` None: no colour."""

    words: tuple[str, ...]
    title: str
    shade: tuple[int, int, int] | None = None
    ink: str = "black"


@dataclass(frozen=True)
class LinkMap:
    """Rows send, columns receive; None on the diagonal. ``key`` says what stands in a cell."""

    names: tuple[str, ...]
    cells: tuple[tuple[LinkCell | None, ...], ...]
    key: str
    by_site: bool = False


@dataclass(frozen=True)
class Steps:
    """One step of one strategy: as simulated, and as traced where it was."""

    simulated: Timeline | None = None
    measured: Timeline | None = None


@dataclass(frozen=True)
class Checked:
    """What ``verify`` found. ``items``: (name, whether it holds or None where it was not checked, detail)."""

    ok: bool
    items: tuple[tuple[str, bool | None, str], ...]
    took_s: float


@dataclass(frozen=True)
class Again:
    """How to get the same. ``commands``: (what it is for, as typed); ``facts``: (name, value)."""

    commands: tuple[tuple[str, str], ...] = ()
    facts: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Report:
    """All of it. ``created``: when, in words (UTC). ``steps`` and ``checked`` by strategy.

    ``about``: what all rows have in common (batch, microbatches, schedule), a phrase each.
    """

    cluster: str
    workload: str
    created: str
    rows: Sequence[Row]
    outcomes: Sequence[Outcome]
    about: Sequence[str] = ()
    machines: Sequence[Machine] = ()
    links: LinkMap | None = None
    steps: Mapping[str, Steps] = field(default_factory=dict)
    checked: Mapping[str, Checked] = field(default_factory=dict)
    sweeps: Sequence[Sweep] = ()
    again: Again = field(default_factory=Again)
    notes: Sequence[str] = ()

    def outcome(self, strategy: str) -> Outcome:
        """That strategy's."""
        return next(one for one in self.outcomes if one.strategy == strategy)

    @property
    def planned(self) -> list[Row]:
        """The rows that have a plan."""
        return [row for row in self.rows if row.predicted_s is not None]

    @property
    def measured(self) -> list[Row]:
        """The rows that were run."""
        return [row for row in self.rows if row.measured is not None]

    def panels(self) -> list[tuple[str, Timeline]]:
        """(strategies, their simulated step) each, those with the same plan together."""
        found: list[tuple[str, Plan, Timeline]] = []
        for row in self.planned:
            plan, line = self.outcome(row.strategy).plan, self.steps.get(row.strategy, Steps()).simulated
            if plan is None or line is None:
                continue
            twin = next((i for i, (_, known, _) in enumerate(found) if known.stages == plan.stages), None)
            if twin is None:
                found.append((row.strategy, plan, line))
            else:
                called, known, drawn = found[twin]
                found[twin] = (f"{called} = {row.strategy}", known, drawn)
        return [(called, line) for called, _, line in found]
