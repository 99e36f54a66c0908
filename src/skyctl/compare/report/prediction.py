"""Predicted against measured: the step of every strategy, and the work of every device in it."""

from __future__ import annotations

from skyctl.compare.off import sentences
from skyctl.compare.report import parts
from skyctl.compare.report.facts import Report
from skyctl.compare.report.markup import Markup, el, join, name
from skyctl.compare.report.scale import Scale, axis, grid, of_seconds
from skyctl.compare.rows import Row
from skyctl.compare.verdict import best_of
from skyctl.compare.words import UNKNOWN, number, percent, seconds, times
from skyctl.records.measurement import Measurement

HIGH = 22


def prediction(report: Report) -> Markup:
    """The section."""
    if not report.planned:
        return parts.section("prediction", "Predicted and measured", None, parts.empty("There is no plan."))
    inside: list[object] = [_table(report)]
    if report.measured:
        inside.append(_dots(report))
        inside.append(_off(report))
        lead = "The same plan, simulated from the probe's figures before the run, and run."
    else:
        lead = (
            "Predictions from the probe's figures. With --measure each plan is run, and stands beside them."
        )
    return parts.section("prediction", "Predicted and measured", lead, inside)


def _table(report: Report) -> Markup:
    measured = bool(report.measured)
    heads = ["", "predicted", "over even", "above bound"]
    heads += ["measured", "p10 – p90", "over even", "predicted off by", "loss"] if measured else []
    best = best_of(report.rows)
    lines = []
    for row in report.rows:
        cells: list[object] = [
            name(row.strategy),
            seconds(row.predicted_s),
            times(row.predicted_speedup),
            _gap(row),
        ]
        if measured:
            took = row.measured
            spread = f"{seconds(took.p10)} – {seconds(took.p90)}" if took else UNKNOWN
            cells += [
                seconds(took.median if took else None),
                spread,
                times(row.measured_speedup),
                percent(row.prediction_error),
                number(row.final_loss),
            ]
        lines.append(cells)
    which = next((i for i, row in enumerate(report.rows) if row is best), -1)
    return parts.figure("Steps", "medians without the first step, which is warm-up" if measured else None,
                        parts.table(heads, lines, "Steps, predicted and measured", which))  # fmt: skip


def _gap(row: Row) -> str:
    if row.gap is None:
        return UNKNOWN
    return "proved" if row.gap <= 1e-9 else percent(row.gap)


def _dots(report: Report) -> Markup:
    """A line a device and plan: a ring where it was predicted to be, a dot where it was."""
    groups = [(rows[0], called) for rows, called in parts.groups(report) if rows[0].measured]
    values = [s.measured_compute_s or 0.0 for row, _ in groups for s in row.shares]
    values += [s.predicted_compute_s for row, _ in groups for s in row.shares]
    values += [row.measured.p90 for row, _ in groups if row.measured]
    values += [row.predicted_s or 0.0 for row, _ in groups]
    scale = of_seconds(max(values), 1.03)
    lanes = []
    for row, called in groups:
        lanes.append(_dot_step(row, called, scale))
        lanes += [
            _dot(
                name(share.label),
                share.predicted_compute_s,
                share.measured_compute_s,
                scale,
                f"{called}, {share.label}",
                "computing",
            )
            for share in row.shares
            if share.measured_compute_s is not None
        ]
    entries = (
        (el("circle", cx=11, cy=6, r=4.5, class_="ring"), "predicted"),
        (el("circle", cx=11, cy=6, r=5, class_="measured"), "measured, median"),
        (parts.stroke("whisker on"), "p10 to p90 of the steps"),
    )
    return parts.figure(
        "Steps, and each device's computing in them",
        "a dot in its ring is a prediction that held",
        parts.legend(*entries),
        el("ul", lanes, class_="lanes"),
        el("div", axis(scale, "a step"), class_="axis-lane"),
    )


def _dot_step(row: Row, called: str, scale: Scale) -> Markup:
    took = row.measured
    assert took is not None
    whisker = [
        el("line", x1=scale.x(took.p10), x2=scale.x(took.p90), y1=HIGH / 2, y2=HIGH / 2, class_="whisker on"),
        *(
            el(
                "line",
                x1=scale.x(end),
                x2=scale.x(end),
                y1=HIGH / 2 - 5,
                y2=HIGH / 2 + 5,
                class_="whisker on",
            )
            for end in (took.p10, took.p90)
        ),
    ]
    who = join(name(called), ": the step")
    return _dot(who, row.predicted_s or 0.0, took.median, scale, called, "the step", whisker)


def _dot(
    who: object, said_s: float, did_s: float, scale: Scale, called: str, what: str, more: object = None
) -> Markup:
    middle = HIGH / 2
    words = f"{called}, {what}: predicted {seconds(said_s)}, measured {seconds(did_s)}"
    drawn = [
        *grid(scale, HIGH),
        el("line", x1=0, x2="100%", y1=middle, y2=middle, class_="grid"),
        more,
        el("circle", parts.title(words), cx=scale.x(said_s), cy=middle, r=7, class_="ring"),
        el("circle", parts.title(words), cx=scale.x(did_s), cy=middle, r=4, class_="measured"),
    ]
    figures = [el("b", seconds(did_s)), " · ", percent(said_s / did_s - 1) if did_s else UNKNOWN]
    shown = el("span", who, style=None if more else "font-weight:400;padding-left:.9rem")
    return parts.lane(shown, None, drawn, figures, words, "thin")


def _off(report: Report) -> Markup:
    """What was not as predicted, and which of it explains the step."""
    said: list[object] = []
    for rows, called in parts.groups(report):
        done = report.outcome(rows[0].strategy).measurement
        if done is None:
            continue
        known = sentences(_labelled(done, {share.device: share.label for share in rows[0].shares}))
        if known:
            said.append(el("h3", name(called), style="margin-top:1rem"))
            said.append(el("ul", [el("li", name(text)) for text in known], class_="said"))
    if not said:
        return join()
    caption = "Each cause by itself: the plan played again with that part as measured, all else as predicted."
    return parts.figure("What was off", None, said, caption=caption)


def _labelled(done: Measurement, labels: dict[str, str]) -> Measurement:
    """The same with devices called as in the rest of the report."""

    def called(device: str) -> str:
        return labels.get(device, device)

    differences = tuple(
        one.model_copy(
            update={
                "device": called(one.device) if one.device else None,
                "target": called(one.target) if one.target else None,
            }
        )
        for one in done.differences
    )
    replicas = tuple(one.model_copy(update={"device": called(one.device)}) for one in done.replicas)
    return done.model_copy(update={"differences": differences, "replicas": replicas})
