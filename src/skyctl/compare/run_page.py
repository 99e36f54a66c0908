"""The page of one run while it trains, made from ``templates/watch.html`` and the report's charts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from skyctl.compare.charts.chart import LaneChart
from skyctl.compare.charts.run_charts import (
    LOSS_LEGEND,
    SECONDS_LEGEND,
    run_devices_chart,
    run_loss_chart,
    run_seconds_chart,
)
from skyctl.compare.charts.templates import template_environment
from skyctl.compare.number_format import (
    UNKNOWN,
    format_estimate,
    format_number,
    format_percent,
    format_seconds,
    format_span,
)
from skyctl.compare.run_figures import RunFigures

STATUS_WORDS = {
    "starting": "Starting",
    "running": "Training",
    "restarting": "Restarting",
    "stopping": "Stopping",
    "done": "Done",
    "failed": "Failed",
    "stopped": "Stopped",
    "unsupervised": "Nobody supervises it",
}
ATTEMPT_HEADS = ("attempt", "began", "ended", "from", "predicted", "why", "ended by")


@dataclass(frozen=True)
class RunPage:
    """A run's page at one moment. ``parts``: by the id of its place, HTML that is escaped already."""

    title: str
    workload: str
    cluster: str
    run_id: str
    ended: bool
    parts: Mapping[str, Markup]

    def document(self, nonce: str) -> str:
        """The whole page.

        Args:
            nonce: names the page's own style and script, the only ones that its security policy lets be.
        """
        return _templates().get_template("watch.html").render(page=self, nonce=nonce)


@dataclass(frozen=True)
class _View:
    """The values that the templates are given."""

    heading: str
    detail: str | None
    tiles: list[tuple[str, str, str]]
    devices: LaneChart | None
    no_devices: str
    attempt_heads: tuple[str, ...]
    attempts: list[tuple[str, ...]]
    nodes: list[tuple[str, str]]
    notes: list[tuple[str, str, str]]


@cache
def _templates() -> Environment:
    return template_environment()


def render_run(figures: RunFigures) -> RunPage:
    """The page. Everything in it that is not of the templates is escaped."""
    state, unit = figures.state, figures.unit
    view = _View(
        heading=_heading(figures),
        detail=figures.detail,
        tiles=_tiles(figures),
        devices=run_devices_chart(figures),
        no_devices="A script's devices tell skyctl nothing."
        if state.is_script
        else "No device has told yet.",
        attempt_heads=ATTEMPT_HEADS,
        attempts=_attempts(figures),
        nodes=[
            *((name, "is away: it can't be reached at the moment") for name in state.away),
            *((name, f"was lost: {why}") for name, why in state.lost.items()),
        ],
        notes=[(_clock(note.at), note.kind or "note", note.text) for note in reversed(figures.notes)],
    )
    mean = f"A point is the mean of up to {figures.point_steps} {unit}s." if figures.point_steps > 1 else ""
    warm = f"Without each attempt's first {unit}, which is warm-up. {mean}".strip()
    none = "A script counts its own steps." if state.is_script else f"No {unit} has ended yet."
    make: Any = _templates().get_template("watch_parts.html").module
    loss, seconds = run_loss_chart(figures), run_seconds_chart(figures)
    loss_legend = LOSS_LEGEND if figures.validation else LOSS_LEGEND[:1]
    return RunPage(
        title=f"{view.heading} · {state.workload} · skyctl",
        workload=state.workload,
        cluster=state.cluster,
        run_id=state.run_id,
        ended=figures.ended,
        parts={
            "state": make.state(view),
            "figures": make.figures(view),
            "loss": make.curves(loss, "Loss", loss_legend, mean, none),
            "seconds": make.curves(seconds, f"Seconds a {unit}", SECONDS_LEGEND, warm, none),
            "devices": make.devices(view),
            "attempts": make.attempts(view),
            "notes": make.notes(view),
        },
    )


def _heading(figures: RunFigures) -> str:
    """``Training: step 37 of 100``."""
    state, words = figures.state, STATUS_WORDS.get(figures.status, figures.status)
    if state.steps is None:
        return f"{words}: a script"
    count = f"{figures.unit} {state.step} of {state.steps}"
    if figures.status == "done":
        return f"Done: {count}"
    return f"{words} after {count}" if figures.ended else f"{words}: {count}"


def _tiles(figures: RunFigures) -> list[tuple[str, str, str]]:
    """(term, value, small note) of the newest figures; none of a script's run, which tells none."""
    state, unit = figures.state, figures.unit
    if state.is_script:
        return []
    first = figures.loss[0].value if figures.loss else None
    loss = ("loss", format_number(figures.last_loss), f"{format_number(first)} at first" if first else "")
    note = ""
    if figures.predicted_s is not None:
        note = f"predicted {format_estimate(figures.predicted_s, figures.interval)}"
    if figures.pace_s and figures.predicted_s:
        off = figures.pace_s / figures.predicted_s - 1
        note += f"; {format_percent(abs(off), sign=False)} {'longer' if off > 0 else 'shorter'}"
    rate = "" if figures.samples_per_s is None else f"{figures.samples_per_s:.1f} samples/s"
    left = UNKNOWN if figures.left_s is None or figures.ended else format_span(figures.left_s)
    kept = "no checkpoint yet" if state.checkpoint is None else f"checkpoint after {unit} {state.checkpoint}"
    return [
        loss,
        (f"a {unit} now", format_seconds(figures.pace_s), note),
        ("left", left, rate),
        ("attempts", str(len(state.attempts)), kept),
    ]


def _attempts(figures: RunFigures) -> list[tuple[str, ...]]:
    return [
        (
            str(attempt.number),
            _clock(attempt.began),
            _clock(attempt.ended) if attempt.ended else UNKNOWN,
            f"{figures.unit} {attempt.from_step}",
            format_seconds(attempt.predicted_iteration_s),
            attempt.why,
            attempt.error or "",
        )
        for attempt in figures.state.attempts
    ]


def _clock(at: str) -> str:
    """A moment as the clock on this machine's wall has it; what is no moment as it is."""
    try:
        return f"{datetime.fromisoformat(at).astimezone():%H:%M:%S}"
    except (ValueError, OverflowError):
        return at
