"""The head of the report: the verdict, four figures, and the steps beside each other."""

from __future__ import annotations

from skyctl.compare.report import parts
from skyctl.compare.report.facts import Report
from skyctl.compare.report.markup import Markup, el, join, name
from skyctl.compare.report.scale import Scale, axis, grid, of_seconds
from skyctl.compare.rows import BASELINE, Row
from skyctl.compare.verdict import best_of, verdict
from skyctl.compare.words import UNKNOWN, percent, seconds, times

HIGH = 34


def opening(report: Report) -> Markup:
    """The verdict as the page's heading, and what was compared on what."""
    said = verdict(report.rows)
    return join(
        el(
            "p",
            "skyctl compare · ",
            name(report.workload),
            " on ",
            name(report.cluster),
            f" · {report.created}",
            class_="eyebrow",
        ),
        el("h1", f"{said[:1].upper()}{said[1:]}." if not said.startswith(parts.KNOWN) else f"{said}."),
        el("p", _about(report), class_="lead"),
    )


def summary(report: Report) -> Markup:
    """The first section: figures, and every strategy's step."""
    best = best_of(report.rows)
    inside: list[object] = [_tiles(report, best)] if best is not None else []
    inside.append(_steps(report) if report.planned else parts.empty("No strategy gives a plan that fits."))
    failed = [row for row in report.rows if row.error]
    if failed:
        inside.append(
            el(
                "ul",
                [
                    el("li", el("b", name(row.strategy)), f" {_failure(row)}: ", name(row.error or ""))
                    for row in failed
                ],
                class_="said",
            )
        )
    return el("section", inside, id="verdict", aria_label="The verdict in figures")


def _failure(row: Row) -> str:
    if row.predicted_s is not None:
        return "did not run to its end"
    return "does not fit" if row.status == "infeasible" else "has no plan"


def _about(report: Report) -> str:
    what = "Each strategy gives every machine a range of the model's layers. "
    if report.measured:
        what += "Predicted is what the simulator says; measured is what real training steps took. "
    else:
        what += "All steps here are predicted; nothing was run. "
    return what + (f"Every row: {', '.join(report.about)}." if report.about else "")


def _tiles(report: Report, best: Row) -> Markup:
    base = next((row for row in report.planned if row.strategy == BASELINE), None)
    measured = best.measured is not None
    step_s = best.measured.median if best.measured else best.predicted_s
    against = ""
    if base is not None and base is not best:
        base_s = base.measured.median if measured and base.measured else base.predicted_s
        against = f"{seconds(base_s)} under {base.strategy}"
    tiles = [
        (f"a step under {best.strategy}", seconds(step_s), "measured" if measured else "predicted", against)
    ]
    if base is not None and base is not best:
        said = best.measured_speedup if measured else best.predicted_speedup
        note = f"predicted {times(best.predicted_speedup)}" if measured else "predicted"
        tiles.append(
            ("faster than even", times(said), "measured" if measured else "", note if measured else "")
        )
    errors = [abs(row.prediction_error) for row in report.measured if row.prediction_error is not None]
    if errors:
        which = f"over {len(errors)} strategies" if len(errors) > 1 else ""
        tiles.append(("predictions off by", percent(max(errors), sign=False), "at most", which))
    tiles.append(_sure(best))
    return el(
        "dl",
        [
            el(
                "div",
                el("dt", term),
                el("dd", value, el("small", ", ".join(filter(None, (first, second))) or " ")),
            )
            for term, value, first, second in tiles
        ],
        class_="tiles",
    )


def _sure(best: Row) -> tuple[str, str, str, str]:
    if best.gap is None:
        return ("how far from the best", UNKNOWN, "no bound is known", "")
    if best.gap <= 1e-9:
        return ("how far from the best", "0 %", "proved, for what was measured", "")
    return ("how far from the best", percent(best.gap, sign=False), "at most", "by the proved bound")


def _steps(report: Report) -> Markup:
    scale = of_seconds(parts.longest_s(report), 1.02)
    bound_s = next(
        (row.bound_s for row in report.planned if row.bound_s and row.objective == "iteration"), None
    )
    measured = bool(report.measured)
    entries = [(parts.swatch("predicted"), "predicted")]
    if measured:
        entries.append((parts.swatch("measured"), "measured: median, with p10 to p90"))
    if bound_s is not None:
        entries.append(
            (parts.stroke("bound", upright=True), "the bound: no plan is predicted faster (proved)")
        )
    lanes = [_step_lane(row, scale, bound_s) for row in report.planned]
    return parts.figure(
        "One training step",
        "shorter is better",
        parts.legend(*entries),
        el("ul", lanes, class_="lanes"),
        el("div", axis(scale, "a step"), class_="axis-lane"),
    )


def _step_lane(row: Row, scale: Scale, bound_s: float | None) -> Markup:
    drawn: list[object] = [*grid(scale, HIGH)]
    step_s = row.predicted_s or 0.0
    both = row.measured is not None
    drawn.append(
        el(
            "rect",
            parts.title(f"{row.strategy}, predicted: {seconds(step_s)}"),
            x=0,
            y=3 if both else 8,
            width=scale.wide(step_s),
            height=13 if both else 18,
            class_="predicted",
        )
    )
    if row.measured:
        took = row.measured
        words = f"{seconds(took.median)}, p10 {seconds(took.p10)}, p90 {seconds(took.p90)}"
        drawn.append(
            el(
                "rect",
                parts.title(f"{row.strategy}, measured: {words}"),
                x=0,
                y=18,
                width=scale.wide(took.median),
                height=13,
                class_="measured",
            )
        )
        drawn.append(
            el("line", x1=scale.x(took.p10), x2=scale.x(took.p90), y1=24.5, y2=24.5, class_="whisker")
        )
        drawn += [
            el("line", x1=scale.x(end), x2=scale.x(end), y1=21, y2=28, class_="whisker")
            for end in (took.p10, took.p90)
        ]
    if bound_s is not None:
        drawn.append(el("line", x1=scale.x(bound_s), x2=scale.x(bound_s), y1=0, y2=HIGH, class_="bound"))
    shown_s = row.measured.median if row.measured else row.predicted_s
    speedup = row.measured_speedup if row.measured else row.predicted_speedup
    below = f"predicted {seconds(row.predicted_s)}" if row.measured else None
    figures = [el("b", seconds(shown_s)), f" · {times(speedup)}" if speedup else "", el("small", below or "")]
    said = f"{row.strategy}: predicted {seconds(row.predicted_s)}"
    said += f", measured {seconds(row.measured.median)}" if row.measured else ""
    return parts.lane(name(row.strategy), None, drawn, figures, said)
