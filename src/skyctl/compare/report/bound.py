"""How good the plans are: the bound, how busy the devices are, and each certificate in words."""

from __future__ import annotations

from skyctl.compare.report import parts
from skyctl.compare.report.facts import Checked, Report
from skyctl.compare.report.markup import Markup, el, join, name
from skyctl.compare.report.scale import Scale, axis, grid, of_seconds
from skyctl.compare.rows import Row
from skyctl.compare.words import UNKNOWN, percent, seconds
from skyctl.records.plan import Plan

HIGH = 28
STRATEGIES = {
    "even": "the same number of layers for every device, in the order of the cluster file",
    "heuristic": "layers by memory, levelled by speed, then improved by local search",
    "optimal": "an exact search with bounds, which stops when nothing better is left or its time is over",
}


def bound(report: Report) -> Markup:
    """The section on the bound and on how much of the devices' time is used."""
    if not report.planned:
        return parts.section(
            "bound", "The bound, and how busy the devices are", None, parts.empty("No plan.")
        )
    known = [row for row in report.planned if row.bound_s is not None]
    lead = (
        "The bound is proved for the numbers that were measured: no cut of the layers and no order of the "
        "devices can be faster under the model of time that also makes the predictions."
        if known
        else "No strategy that was compared claims a bound; optimal does."
    )
    inside = [_distance(report, known)] if known else []
    return parts.section("bound", "The bound, and how busy the devices are", lead, inside, _busy(report))


def _distance(report: Report, known: list[Row]) -> Markup:
    by_step = known[0].objective == "iteration"
    values = {row.strategy: _value_s(report, row) for row in known}
    scale = of_seconds(max(values.values()), 1.02)
    lanes = []
    for rows, called in parts.groups(report):
        row = rows[0]
        if row.bound_s is None:
            continue
        value_s = values[row.strategy]
        drawn = [
            *grid(scale, HIGH),
            el("rect", parts.title(f"the bound: {seconds(row.bound_s)}"), x=0, width=scale.wide(row.bound_s),
               y=6, height=16, class_="d-optimal"),
        ]  # fmt: skip
        if value_s > row.bound_s * (1 + 1e-9):
            more = f"above the bound: {seconds(value_s - row.bound_s)}"
            drawn.append(
                el("rect", parts.title(more), x=scale.x(row.bound_s), width=scale.wide(value_s - row.bound_s),
                   y=6, height=16, class_="hatched")
            )  # fmt: skip
        drawn.append(el("line", x1=scale.x(value_s), x2=scale.x(value_s), y1=2, y2=26, class_="end"))
        above = "at the bound" if (row.gap or 0) <= 1e-9 else f"{percent(row.gap, sign=False)} above"
        figures = [el("b", seconds(value_s)), el("small", above)]
        lanes.append(parts.lane(name(called), None, drawn, figures, f"{called}: {seconds(value_s)}, {above}"))
    entries = (
        (parts.swatch("d-optimal"), "what no plan can do without (the bound)"),
        (parts.swatch("hatched"), "what this plan takes more"),
    )
    return parts.figure(
        "Distance from the bound",
        [
            "no plan can take less than ",
            el("b", seconds(known[0].bound_s)),
            "" if by_step else " a microbatch",
        ],
        parts.legend(*entries),
        el("ul", lanes, class_="lanes"),
        el("div", axis(scale, "a step" if by_step else "a microbatch"), class_="axis-lane"),
    )


def _value_s(report: Report, row: Row) -> float:
    plan = report.outcome(row.strategy).plan
    return plan.certificate.value_s if plan is not None else 0.0


def _busy(report: Report) -> Markup:
    scale = Scale(100.0, 1.0, "%")
    lanes = []
    for rows, called in parts.groups(report):
        row = rows[0]
        plan = report.outcome(row.strategy).plan
        count = len(plan.problem.devices) if plan is not None else len(row.shares)
        said, did = used(row, count)
        drawn = [*grid(scale, HIGH), el("rect", x=0, y=4, width="100%", height=20, class_="track")]
        high = 12 if did is not None else 20
        if said is not None:
            text = f"{called}: {said:.0%} predicted"
            drawn.append(el("rect", parts.title(text), x=0, y=4, width=scale.wide(100 * said), height=high,
                            class_="predicted"))  # fmt: skip
        if did is not None:
            text = f"{called}: {did:.0%} measured"
            drawn.append(el("rect", parts.title(text), x=0, y=17, width=scale.wide(100 * did), height=7,
                            class_="measured"))  # fmt: skip
        shown = did if did is not None else said
        below = f"predicted {said:.0%}" if did is not None and said is not None else None
        figures = [
            el("b", f"{shown:.0%}" if shown is not None else UNKNOWN),
            " busy",
            el("small", below or ""),
        ]
        lanes.append(
            parts.lane(name(called), f"{len(row.shares)} of {count} devices used", drawn, figures, called)
        )
    return parts.figure(
        "How busy the cluster is",
        "all devices, computing, over all their time",
        el("ul", lanes, class_="lanes"),
        el("div", axis(scale, "of the cluster's time"), class_="axis-lane"),
        caption="A slow device in a fast plan may wait: what counts is the step, not that all are busy.",
    )


def used(row: Row, devices: int) -> tuple[float | None, float | None]:
    """Which part of all devices' time is computing: predicted, measured."""
    said = did = None
    if row.predicted_s and devices:
        said = sum(share.predicted_compute_s for share in row.shares) / (devices * row.predicted_s)
    parts_s = [share.measured_compute_s for share in row.shares]
    if row.measured and row.measured.median and devices and None not in parts_s:
        did = sum(one or 0.0 for one in parts_s) / (devices * row.measured.median)
    return (None if said is None else min(1.0, said)), (None if did is None else min(1.0, did))


def certificates(report: Report) -> Markup:
    """The section: what each plan's certificate claims, and how to check it."""
    lead = join(
        "A certificate says how sure it is that nothing is faster. ",
        el("code", "skyctl verify"),
        " checks it with code of its own, without the solver that made it: memory, the prediction played "
        "again, and the bound.",
    )
    said = [_certificate(report, row) for row in report.planned]
    return parts.section(
        "certificate", "Certificates", lead, said or parts.empty("There is no plan to certify.")
    )


def _certificate(report: Report, row: Row) -> Markup:
    plan = report.outcome(row.strategy).plan
    assert plan is not None
    sure = plan.certificate
    facts = [
        ("plan", f"{row.strategy}.plan.json: {STRATEGIES.get(row.strategy, 'as assigned')}"),
        ("method", f"{sure.method}, in {seconds(sure.wall_s)}"),
    ]
    checked = report.checked.get(row.strategy)
    return el(
        "div",
        el("h3", name(row.strategy), f": {_status(row, plan)}"),
        el("p", _words(row, plan)),
        el("dl", [join(el("dt", term), el("dd", name(text))) for term, text in facts], class_="facts"),
        _checks(checked) if checked is not None else None,
        class_=f"certificate {'proved' if (row.gap is not None and row.gap <= 1e-9) else ''}".strip(),
    )


def _status(row: Row, plan: Plan) -> str:
    if plan.certificate.status == "optimal":
        return "proved optimal"
    if plan.certificate.status == "bounded":
        return f"within {percent(row.gap, sign=False)} of the best"
    return "claims no bound of its own"


def _words(row: Row, plan: Plan) -> str:
    problem, sure = plan.problem, plan.certificate
    what = (
        f"{_many(len(problem.layers), 'layer')} on {_many(len(problem.devices), 'device')}, "
        f"{_many(problem.microbatches, 'microbatch')}, schedule {problem.schedule}"
    )
    goal = "a step" if problem.objective == "iteration" else "a microbatch on the slowest stage"
    if sure.status == "optimal":
        return (
            f"For {what}: no cut of the layers and no choice or order of the devices takes less than "
            f"{seconds(sure.lower_bound_s)} {goal} by the model of time; this plan takes just that."
        )
    if sure.lower_bound_s is not None:
        return (
            f"For {what}: nothing can take less than {seconds(sure.lower_bound_s)} {goal}; this plan takes "
            f"{seconds(sure.value_s)}. What lies between was not searched to its end in the time given."
        )
    if row.bound_s is not None:
        where = "is at that bound, so it is as good as any" if (row.gap or 0) <= 1e-9 else (
            f"takes {seconds(sure.value_s)}, {percent(row.gap, sign=False)} above it"
        )  # fmt: skip
        proved = f"the bound that optimal proved, {seconds(row.bound_s)} {goal}, holds for it too"
        return f"For {what}: {proved}; it {where}."
    return f"For {what}: {seconds(sure.value_s)} {goal}; nothing is claimed about others."


def _many(count: int, what: str) -> str:
    plural = what + ("es" if what.endswith("ch") else "s")
    return f"{count} {what if count == 1 else plural}"


def _checks(checked: Checked) -> Markup:
    marks = {
        True: ("✓", "mark", "holds"),
        False: ("✗", "mark bad", "does not hold"),
        None: ("–", "mark open", "not checked"),
    }
    lines = []
    for called, holds, detail in checked.items:
        sign, look, words = marks[holds]
        lines.append(el("li", el("span", sign, class_=look, title=words), f"{called}: ", name(detail)))
    return join(
        el(
            "p",
            f"Checked by skyctl verify when this was written, in {seconds(checked.took_s)}:",
            class_="small muted",
        ),
        el("ul", lines, class_="checks"),
    )
