"""A comparison as a whole: ``comparison.json``, its table at the end, and the one while it goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal

from pydantic import Field
from rich.markup import escape
from rich.table import Table

from skyctl.compare.conclusion import Conclusion
from skyctl.compare.number_format import (
    UNKNOWN,
    estimate_parts,
    format_estimate,
    format_gap,
    format_number,
    format_ratio,
    format_seconds,
    format_seconds_range,
    prediction_error_parts,
)
from skyctl.compare.outcome import BASELINE, ComparisonRow, StrategyOutcome, summarize_outcomes
from skyctl.compare.step_seconds import measured_step_s, uneven_steps
from skyctl.compare.sweeps import ComparisonSweep
from skyctl.compare.sync_summary import SyncRow
from skyctl.records.base import FileRecord, Seq
from skyctl.records.interval import Interval
from skyctl.records.measurement import median

_STYLES = {"running": "bold", "waiting": "dim", "no plan": "dim", "failed": "red"}


class Comparison(FileRecord):
    """``comparison.json``, which ``--json`` prints, too. ``files``: by what it is, where it was written.

    ``syncs``: the best plan for each way to sum gradients, where the rows are of several pipelines.

    ``workload``: as typed. ``verdict``: the comparison in a sentence; ``conclusion``: the same as data.
    """

    kind: Literal["skyctl/comparison"] = "skyctl/comparison"
    version: Literal[6] = 6
    cluster: str | None = None
    workload: str | None = None
    rows: Seq[ComparisonRow]
    files: dict[str, str] = Field(default_factory=dict)
    sweeps: Seq[ComparisonSweep] = ()
    verdict: str | None = None
    conclusion: Conclusion | None = None
    syncs: Seq[SyncRow] = ()


def comparison_table(compared: Sequence[ComparisonRow], best: str | None = None) -> Table:
    """For a terminal. A figure that was not measured has no column; the row of the strategy ``best`` is bold.

    The columns of strategies and of layers are those that wrap: 80 columns hold all of it.
    """
    measured = any(row.measured for row in compared)
    # Two lines a heading, spreads and intervals below their times: so that all of it fits into 80 columns.
    out = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold", collapse_padding=True)
    out.add_column("strategy", overflow="fold", min_width=9)
    out.add_column("layers per device", overflow="fold", ratio=1, min_width=10)
    for heading in _headings(compared):
        out.add_column("\n".join(heading), justify="right", no_wrap=True)
    for row in compared:
        name = escape(row.label)
        if not row.planned:
            dashes = [UNKNOWN] * len(_headings(compared))
            out.add_row(f"[dim]{name}[/]", f"[yellow]{escape(row.why_no_plan)}[/]", *dashes)
            continue
        layers = escape(row.layers) + (f"\n[yellow]{escape(row.error)}[/]" if row.error else "")
        unused = f"\n[dim]unused: {escape(', '.join(row.unused))}[/]" if row.unused else ""
        cells = map("\n".join, _cells(row, measured))
        out.add_row(name, layers + unused, *cells, style="bold" if row.strategy == best else None)
    return out


def comparison_lines(compared: Sequence[ComparisonRow]) -> list[str]:
    """For a pipe: one line a strategy, columns two blanks apart, the layers (or why there are none) last."""
    measured = any(row.measured for row in compared)
    lines = [("strategy", *map(" ".join, _headings(compared)), "layers per device")]
    for row in compared:
        unused = [f"unused: {', '.join(row.unused)}"] if row.unused else []
        layers = [row.layers, *unused, *([row.error] if row.error else [])]
        last = "; ".join(layers) if row.planned else row.why_no_plan
        lines.append((row.label, *map(" ".join, _cells(row, measured)), " ".join(last.split())))
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]) - 1)]
    return [
        "  ".join((line[0].ljust(widths[0]), *map(str.rjust, line[1:-1], widths[1:]), line[-1]))
        for line in lines
    ]


def _headings(compared: Sequence[ComparisonRow]) -> list[tuple[str, ...]]:
    """The columns' headings, each in one or two lines."""
    step = "step (80%)" if any(row.predicted_interval for row in compared) else "step"
    headings: list[tuple[str, ...]] = [("predicted", step), ("over", "even"), ("above", "bound")]
    if any(row.measured for row in compared):
        headings += [("measured", "step"), ("over", "even"), ("prediction",), ("loss",)]
    return headings


def _cells(row: ComparisonRow, measured: bool) -> list[list[str]]:
    """A row's figures under the headings, each in up to three lines."""
    predicted = estimate_parts(row.predicted_s, row.predicted_interval)
    cells = [predicted, [format_ratio(row.predicted_speedup)], [format_gap(row.gap)]]
    if measured:
        took = row.measured
        cells += [
            [format_seconds(row.measured_s), format_seconds_range(took.p10, took.p90)] if took else [UNKNOWN],
            [format_ratio(row.measured_speedup)],
            [*prediction_error_parts(row.prediction_error), *_within(row)],
            [format_number(row.final_loss)],
        ]
    return cells


def _within(row: ComparisonRow) -> list[str]:
    """Whether the run was within the predicted interval, in a word; nothing where that is unknown."""
    return [] if row.within_interval is None else ["(within)" if row.within_interval else "(outside)"]


@dataclass
class StrategyProgress:
    """How far a strategy's run is. ``took_s``: its steps so far, the first of which is warm-up.

    ``phase``: what it does before and after its steps. ``unit``: what the run counts; all seconds are for the
    samples of a step, of which one of these has ``steps_per_iteration``. ``on_average``: steps are compared
    on average, not by their median. ``ended_s``: the step that is compared, once the run has ended.
    """

    strategy: str
    predicted_s: float | None
    interval: Interval | None
    steps: int
    state: Literal["waiting", "running", "done", "failed", "no plan"]
    phase: str = ""
    unit: Literal["step", "round"] = "step"
    steps_per_iteration: float = 1.0
    on_average: bool = False
    ended_s: float | None = None
    losses: list[float] = field(default_factory=list)
    took_s: list[float] = field(default_factory=list)

    @property
    def step_s(self) -> float | None:
        """The step so far, in seconds, as it is compared."""
        settled = self.took_s[1:] or self.took_s
        if self.ended_s is not None or not settled:
            return self.ended_s
        return fmean(settled) if self.on_average else median(settled)

    def __str__(self) -> str:
        done = len(self.took_s)
        if self.state == "running" and done and not self.phase:
            full = round(10 * min(1.0, done / max(1, self.steps)))
            return f"{'█' * full}{'░' * (10 - full)} {self.unit} {done} of {self.steps}"
        if self.state == "done":
            return f"done, {done} {self.unit}{'' if done == 1 else 's'}"
        return self.phase or self.state


def _waiting(
    outcome: StrategyOutcome, row: ComparisonRow, steps: int, *, on_average: bool
) -> StrategyProgress:
    """A strategy before its run. ``steps``: that it makes, or rounds."""
    return StrategyProgress(
        outcome.strategy,
        row.predicted_s,
        row.predicted_interval,
        steps,
        "no plan" if outcome.plan is None else "waiting",
        unit="step" if outcome.plan is None else outcome.plan.problem.rhythm.unit,
        steps_per_iteration=row.steps_per_iteration,
        on_average=on_average,
    )


class ProgressTable:
    """A comparison whose runs are still going on: a line a strategy, to be drawn again and again."""

    def __init__(self, outcomes: Sequence[StrategyOutcome], steps: int) -> None:
        self._uneven = uneven_steps(outcome.plan for outcome in outcomes)
        self._lines = {
            outcome.strategy: _waiting(outcome, row, steps, on_average=self._uneven is not None)
            for outcome, row in zip(outcomes, summarize_outcomes(outcomes), strict=True)
        }

    def show_phase(self, strategy: str, text: str) -> None:
        """Takes in what a strategy's run does before or after its steps."""
        line = self._lines[strategy]
        line.state, line.phase = "running", text

    def add_step(self, strategy: str, loss: float, took_s: float) -> None:
        """Takes in a step that has ended."""
        line = self._lines[strategy]
        line.state, line.phase = "running", ""
        line.losses.append(loss)
        line.took_s.append(took_s / line.steps_per_iteration)

    def end_run(self, outcome: StrategyOutcome) -> None:
        """Takes in what came of a strategy; one that shares another's run gets that one's figures."""
        line = self._lines[outcome.strategy]
        line.phase = ""
        if outcome.plan is not None and outcome.measurement is not None:
            line.state = "done"
            line.ended_s = measured_step_s(outcome.plan, outcome.measurement, self._uneven)
            line.losses = [step.loss for step in outcome.measurement.steps]
            steps = outcome.measurement.steps
            line.took_s = [step.iteration_s / line.steps_per_iteration for step in steps]
        elif outcome.plan is not None:
            line.state = "failed"

    def table(self) -> Table:
        """All strategies as they are now, for a terminal."""
        out = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        out.add_column("strategy", no_wrap=True)
        out.add_column("state", no_wrap=True, min_width=24)
        for heading in ("loss", "s/step", "predicted", "gain"):
            out.add_column(heading, justify="right", no_wrap=True)
        for line in self._lines.values():
            cells = escape(line.strategy), escape(str(line)), *self._figures(line)
            out.add_row(*cells, style=_STYLES.get(line.state))
        return out

    def ended_line(self, strategy: str) -> str:
        """A strategy's line for a pipe, once its run has ended."""
        line = self._lines[strategy]
        if line.state != "done":
            return f"{strategy}: {line}"
        loss, took, _, gain = self._figures(line)
        predicted = format_estimate(line.predicted_s, line.interval)
        figures = f"loss {loss} · {took} a step, predicted {predicted} · {gain}"
        return f"{strategy}: done, {len(line.took_s)} {line.unit}s · {figures}"

    def _figures(self, line: StrategyProgress) -> tuple[str, str, str, str]:
        """The last loss, the step, its prediction, and the gain over even (in brackets what is predicted)."""
        base, gain = self._lines.get(BASELINE), UNKNOWN
        if base is not None and base.step_s and line.step_s:
            gain = format_ratio(base.step_s / line.step_s)
        elif base is not None and base.predicted_s and line.predicted_s:
            gain = f"({format_ratio(base.predicted_s / line.predicted_s)})"
        loss = format_number(line.losses[-1] if line.losses else None)
        return loss, format_seconds(line.step_s), format_seconds(line.predicted_s), gain
