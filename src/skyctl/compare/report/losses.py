"""How the loss falls: by step, where all plans lie on each other, and by time, where they do not."""

from __future__ import annotations

from itertools import accumulate

from skyctl.compare.report import parts
from skyctl.compare.report.curves import Curve, plot
from skyctl.compare.report.facts import Report
from skyctl.compare.report.markup import Markup, el, name
from skyctl.compare.report.scale import round_ticks
from skyctl.compare.words import seconds
from skyctl.records.measurement import Measurement


def losses(report: Report) -> Markup:
    """The section."""
    runs = [(o.strategy, o.measurement) for o in report.outcomes if o.measurement is not None]
    if not runs:
        text = "Nothing was run. With --measure every strategy trains the same model on the same batches."
        return parts.section("loss", "The loss", None, parts.empty(text))
    strategies = [row.strategy for row in report.rows]
    entries = [
        (parts.stroke(f"s-{parts.colour(strategy, strategies)}"), name(strategy)) for strategy, _ in runs
    ]
    lead = (
        "Every plan trains the same model: initial weights depend on the seed and the layer alone, and the "
        f"batches are the same. {_difference(runs)}"
    )
    by_step = parts.figure("By step", None, _by_step(runs, strategies))
    by_time = parts.figure("By time", None, _by_time(runs, strategies))
    pair = el("div", by_step, by_time, class_="pair")
    return parts.section("loss", "The loss", lead, parts.legend(*entries), pair)


def _difference(runs: list[tuple[str, Measurement]]) -> str:
    if len({run.run_id for _, run in runs}) < 2:
        return ""
    worst = 0.0
    first = {step.step: step.loss for step in runs[0][1].steps}
    for _, run in runs[1:]:
        for step in run.steps:
            if first.get(step.step):
                worst = max(worst, abs(step.loss / first[step.step] - 1))
    if worst == 0:
        return "The losses of all runs are equal to the last digit, at every step."
    return f"The largest relative difference between two runs at any step is {worst:.1e}."


def _by_step(runs: list[tuple[str, Measurement]], strategies: list[str]) -> Markup:
    curves = [
        Curve(
            strategy,
            [(s.step + 1, s.loss, f"{strategy}, step {s.step + 1}: {s.loss:.4f}") for s in run.steps],
            parts.colour(strategy, strategies),
            width=2.0 + 2.5 * (len(runs) - 1 - i),
            dots="d" if len(run.steps) == 1 else "",
        )
        for i, (strategy, run) in enumerate(runs)
    ]
    last = max(x for curve in curves for x, _, _ in curve.points)
    first = min(x for curve in curves for x, _, _ in curve.points)
    ticks = [
        (value, f"{value:.0f}") for value in round_ticks(last, 6) if value >= first and value == int(value)
    ]
    ticks = [(first, f"{first:.0f}"), *(one for one in ticks if one[0] - first > (last - first) / 12)]
    return plot(curves, (first, last), ticks, y_unit="loss", x_unit="step", label="Loss by step")


def _by_time(runs: list[tuple[str, Measurement]], strategies: list[str]) -> Markup:
    curves = []
    for strategy, run in runs:
        ends_s = accumulate(step.iteration_s for step in run.steps)
        points = [
            (at_s, step.loss, f"{strategy}, {seconds(at_s)}: {step.loss:.4f}")
            for at_s, step in zip(ends_s, run.steps, strict=True)
        ]
        curves.append(Curve(strategy, points, parts.colour(strategy, strategies), dots="d"))
    last_s = max(curve.points[-1][0] for curve in curves)
    ticks = [(value, f"{value:g}") for value in round_ticks(last_s, 5)]
    return plot(
        curves, (0.0, last_s), ticks, y_unit="loss", x_unit="seconds of training", label="Loss by time"
    )
