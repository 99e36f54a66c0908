"""The data of a report, made by ``jobs/report_builder.py``; nothing in it says who made the comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from skyctl.compare.charts.chart import ChartGroup, MatrixChart
from skyctl.compare.conclusion import PLAN_NAMES, Conclusion
from skyctl.compare.outcome import ComparisonRow, StrategyOutcome
from skyctl.compare.sweeps import ComparisonSweep
from skyctl.compare.sync_summary import SyncRow
from skyctl.compare.timeline import Timeline
from skyctl.records.plan import Plan


@dataclass(frozen=True)
class DeviceSpeed:
    """How fast a device is on the workload. ``hardware``: its processor, threads and emulated slowdown.

    ``samples_per_s``: of the whole model, if it trained that alone and had the memory. ``spread``: the median
    over its layers of (p90 − p10) / median of their times.
    """

    device: str
    label: str
    hardware: str
    samples_per_s: float | None
    spread: float | None
    memory_bytes: float | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class StepTimelines:
    """One step under a strategy: as simulated, and as traced where its run was."""

    simulated: Timeline | None = None
    measured: Timeline | None = None


@dataclass(frozen=True)
class RouteMap:
    """The routes of a strategy's plan over its links."""

    strategy: str
    charts: ChartGroup


@dataclass(frozen=True)
class VerifiedPlan:
    """``verify``'s findings. ``items``: (name, whether it holds or None where it was not checked, detail)."""

    ok: bool
    items: tuple[tuple[str, bool | None, str], ...]
    took_s: float


@dataclass(frozen=True)
class Reproduction:
    """How to get the figures again. ``commands``: (what it is for, as typed); ``facts``: (name, value)."""

    commands: tuple[tuple[str, str], ...] = ()
    facts: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class ComparisonReport:
    """A whole comparison. ``created``: date and time as written (UTC). ``steps``, ``verified``: by strategy.

    ``about``: what all rows have in common (batch, microbatches, schedule), a phrase each. ``notes``: what to
    know of the devices' figures. ``conclusion``: which strategy to take, and how sure that is.
    ``syncs``: each way to sum gradients. ``routes``: of the plan to take, else of the last that has any.
    """

    cluster: str
    workload: str
    created: str
    rows: Sequence[ComparisonRow]
    outcomes: Sequence[StrategyOutcome]
    conclusion: Conclusion = field(default_factory=Conclusion)
    about: Sequence[str] = ()
    devices: Sequence[DeviceSpeed] = ()
    links: MatrixChart | None = None
    steps: Mapping[str, StepTimelines] = field(default_factory=dict)
    verified: Mapping[str, VerifiedPlan] = field(default_factory=dict)
    sweeps: Sequence[ComparisonSweep] = ()
    reproduction: Reproduction = field(default_factory=Reproduction)
    notes: Sequence[str] = ()
    syncs: Sequence[SyncRow] = ()
    routes: RouteMap | None = None

    def outcome(self, strategy: str) -> StrategyOutcome:
        """The outcome of that strategy (StopIteration where it was not compared)."""
        return next(outcome for outcome in self.outcomes if outcome.strategy == strategy)

    def plan(self, strategy: str) -> Plan:
        """The plan of a strategy; it must have one."""
        plan = self.outcome(strategy).plan
        assert plan is not None
        return plan

    @property
    def best(self) -> ComparisonRow | None:
        """The row of the strategy to take; None: none has a plan."""
        return next((row for row in self.rows if row.strategy == self.conclusion.best), None)

    @property
    def planned(self) -> list[ComparisonRow]:
        """The rows of strategies that gave a plan."""
        return [row for row in self.rows if row.predicted_s is not None]

    @property
    def measured(self) -> list[ComparisonRow]:
        """The rows of strategies that were run for real."""
        return [row for row in self.rows if row.measured is not None]

    @property
    def bounded_name(self) -> str:
        """The name of plans that a bound covers: all, or those that share work out as the row's own does."""
        kinds = {row.parallel for row in self.planned if row.bound_s is not None}
        if len(kinds) > 1:
            return "plan of its kind"
        kind = next(iter(kinds), None)
        return "plan" if kind is None else PLAN_NAMES[kind]

    @property
    def traced(self) -> bool:
        """Whether any run was traced, and is drawn."""
        return any(steps.measured is not None for steps in self.steps.values())

    def groups(self) -> list[tuple[list[ComparisonRow], str]]:
        """Rows with one and the same plan together, and what to call them: ``heuristic = optimal``."""
        groups: list[list[ComparisonRow]] = []
        for row in self.planned:
            twin = next((rows for rows in groups if self._same_plan(rows[0], row)), None)
            if twin is not None:
                twin.append(row)
            else:
                groups.append([row])
        return [(rows, " = ".join(row.label for row in rows)) for rows in groups]

    def _same_plan(self, a: ComparisonRow, b: ComparisonRow) -> bool:
        plan, other = self.plan(a.strategy), self.plan(b.strategy)
        same = (plan.pipelines, plan.sync, plan.problem) == (other.pipelines, other.sync, other.problem)
        return same and a.run_id == b.run_id
