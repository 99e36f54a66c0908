"""The sweeps: the step over the number of microbatches, and over the number of machines."""

from __future__ import annotations

from skyctl.compare.report import parts
from skyctl.compare.report.curves import Curve, plot
from skyctl.compare.report.facts import Report
from skyctl.compare.report.markup import Markup, el, join, name
from skyctl.compare.sweeps import Sweep, sentences, table_of
from skyctl.compare.words import seconds

TITLES = {
    "microbatches": "More or fewer microbatches",
    "nodes": "Machines added one by one, the fastest first",
}


def sweeps(report: Report) -> Markup:
    """The section."""
    if not report.sweeps:
        text = join(
            "Nothing was varied. ",
            el("code", "--microbatches 4,8,16,32"),
            " shows the step for each number, ",
            el("code", "--nodes 2..N"),
            " whether adding a machine pays.",
        )
        return parts.section("sweeps", "Sweeps", None, parts.empty(text))
    lead = "One thing varied, all else as above. Predicted; a full dot was measured."
    return parts.section("sweeps", "Sweeps", lead, [_sweep(one) for one in report.sweeps])


def _sweep(sweep: Sweep) -> Markup:
    strategies = sweep.strategies
    entries = [(parts.stroke(f"s-{parts.colour(one, strategies)}"), name(one)) for one in strategies]
    said = [el("li", name(text)) for text in sentences(sweep)]
    heads, lines = table_of(sweep)
    chosen = next((i for i, one in enumerate(sweep.points) if one.value == sweep.chosen), -1)
    cells = [[name(cell) for cell in line] for line in lines]
    return parts.figure(
        TITLES[sweep.kind],
        None,
        parts.legend(*entries),
        _plot(sweep),
        el("ul", said, class_="said"),
        parts.table(heads, cells, TITLES[sweep.kind], chosen),
        caption="* what the rest of this report is about" if chosen >= 0 else None,
    )


def _plot(sweep: Sweep) -> Markup:
    strategies = sweep.strategies
    curves = []
    for i, strategy in enumerate(strategies):
        look = parts.colour(strategy, strategies)
        words = "microbatches" if sweep.kind == "microbatches" else "nodes"
        for measured in (False, True):
            points = [
                (
                    float(at),
                    step_s,
                    f"{strategy}, {sweep.points[at].value} {words}{_added(sweep, at)}: {seconds(step_s)}"
                    + (" measured" if measured else " predicted"),
                )
                for at, step_s in sweep.line(strategy, measured)
            ]
            if points:
                wide = 2.0 + 1.2 * (len(strategies) - 1 - i)
                curves.append(
                    Curve(
                        strategy, points, look, width=wide, dots="d" if measured else "h", line=not measured
                    )
                )
    if not curves:
        return parts.empty("No plan fits at any of these.")
    top_s = max(y for curve in curves for _, y, _ in curve.points)
    factor, unit = (1.0, "s") if top_s >= 2 else (1e3, "ms") if top_s >= 2e-3 else (1e6, "µs")
    last = max(1, len(sweep.points) - 1)
    ticks = [(float(i), str(one.value)) for i, one in enumerate(sweep.points)]
    shown = ticks if len(ticks) < 14 else ticks[:: -(-len(ticks) // 12)]
    span = (-0.04 * last, last * 1.04) if len(sweep.points) > 1 else (-1.0, 1.0)
    return plot(
        curves, span, shown, y_unit=f"{unit} a step", x_unit=sweep.kind, label=f"Step by {sweep.kind}",
        y_factor=factor, from_zero=True,
    )  # fmt: skip


def _added(sweep: Sweep, at: int) -> str:
    added = sweep.points[at].added
    return f" with {added}" if added else ""
