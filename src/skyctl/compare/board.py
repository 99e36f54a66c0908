"""The comparison while its runs go on: a line a strategy, drawn again and again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.markup import escape
from rich.table import Table

from skyctl.compare.rows import BASELINE, Outcome
from skyctl.compare.stats import median
from skyctl.compare.words import UNKNOWN, number, seconds, times


@dataclass
class Line:
    """One strategy. ``took_s``: its steps so far, the first of which is warm-up.

    ``state``: ``waiting``, ``running``, ``done``, ``failed``, or ``no plan``.
    """

    strategy: str
    predicted_s: float | None
    state: str = "waiting"
    doing: str = ""
    steps: int = 0
    losses: list[float] = field(default_factory=list)
    took_s: list[float] = field(default_factory=list)

    @property
    def step_s(self) -> float | None:
        """The median step so far."""
        settled = self.took_s[1:] or self.took_s
        return median(settled) if settled else None


class Board:
    """All strategies, in their order."""

    def __init__(self, outcomes: Sequence[Outcome], steps: int) -> None:
        self._lines = {
            o.strategy: Line(
                o.strategy,
                o.plan.predicted.iteration_s if o.plan is not None else None,
                "waiting" if o.plan is not None else "no plan",
                steps=steps,
            )
            for o in outcomes
        }

    def doing(self, strategy: str, text: str) -> None:
        """What its run is at, before and after its steps."""
        line = self._lines[strategy]
        line.state, line.doing = "running", text

    def step(self, strategy: str, loss: float, took_s: float) -> None:
        """A step has ended."""
        line = self._lines[strategy]
        line.state, line.doing = "running", ""
        line.losses.append(loss)
        line.took_s.append(took_s)

    def ended(self, outcome: Outcome) -> None:
        """What came of it; one that shares another's run gets that one's figures."""
        line = self._lines[outcome.strategy]
        line.doing = ""
        if outcome.measurement is not None:
            line.state = "done"
            line.losses = [step.loss for step in outcome.measurement.steps]
            line.took_s = [step.iteration_s for step in outcome.measurement.steps]
        elif outcome.plan is not None:
            line.state = "failed"

    def table(self) -> Table:
        """For a terminal."""
        out = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        out.add_column("strategy", no_wrap=True)
        out.add_column("state", no_wrap=True, min_width=24)
        for heading in ("loss", "s/step", "predicted", "gain"):
            out.add_column(heading, justify="right", no_wrap=True)
        for line in self._lines.values():
            style = {"running": "bold", "waiting": "dim", "no plan": "dim", "failed": "red"}.get(line.state)
            out.add_row(escape(line.strategy), escape(self._state(line)), *self._figures(line), style=style)
        return out

    def said(self, strategy: str) -> str:
        """The same line for a pipe, once the strategy is through."""
        line = self._lines[strategy]
        loss, took, predicted, gain = self._figures(line)
        if line.state != "done":
            return f"{strategy}: {self._state(line)}"
        figures = f"loss {loss} · {took} a step, predicted {predicted} · {gain}"
        return f"{strategy}: done, {len(line.took_s)} steps · {figures}"

    def _state(self, line: Line) -> str:
        done, all_ = len(line.took_s), line.steps
        if line.state == "running" and done and not line.doing:
            full = round(10 * min(1.0, done / max(1, all_)))
            return f"{'█' * full}{'░' * (10 - full)} step {done} of {all_}"
        if line.state == "done":
            return f"done, {done} step{'' if done == 1 else 's'}"
        return line.doing or line.state

    def _figures(self, line: Line) -> tuple[str, str, str, str]:
        return (
            number(line.losses[-1] if line.losses else None),
            seconds(line.step_s),
            seconds(line.predicted_s),
            self._gain(line),
        )

    def _gain(self, line: Line) -> str:
        """Over even: measured where both were, else in brackets what is predicted."""
        base = self._lines.get(BASELINE)
        if base is None:
            return UNKNOWN
        if base.step_s and line.step_s:
            return times(base.step_s / line.step_s)
        if base.predicted_s and line.predicted_s:
            return f"({times(base.predicted_s / line.predicted_s)})"
        return UNKNOWN
