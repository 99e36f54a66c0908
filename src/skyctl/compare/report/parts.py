"""What several sections are made of: sections, figures, legends, lanes."""

from __future__ import annotations

from collections.abc import Sequence

from skyctl.compare.report.facts import Report
from skyctl.compare.report.markup import Markup, el, join, name
from skyctl.compare.rows import Row

KNOWN = ("even", "heuristic", "optimal")


def section(ident: str, title: str, lead: object, *inside: object) -> Markup:
    """One section with its heading; ``lead`` says what there is to see, in a sentence or two."""
    heading = el("h2", title, id=f"{ident}-title")
    return el(
        "section",
        heading,
        el("p", lead, class_="lead") if lead else None,
        inside,
        id=ident,
        aria_labelledby=f"{ident}-title",
    )


def figure(title: object, said: object, *inside: object, caption: object = None) -> Markup:
    """A framed plot: its title at the left, its figures at the right."""
    head = el("div", el("h3", title), el("span", said) if said else None, class_="head")
    return el("figure", head, inside, el("figcaption", caption) if caption else None)


def empty(text: object) -> Markup:
    """In the place of a plot that there is nothing for."""
    return el("p", text, class_="empty")


def colour(strategy: str, strategies: Sequence[str]) -> str:
    """What its style is called: ``s-…`` for lines, ``d-…`` for dots, ``h-…`` for rings."""
    if strategy in KNOWN:
        return strategy
    others = [one for one in strategies if one not in KNOWN]
    return f"other{others.index(strategy) % 2}"


def legend(*entries: tuple[Markup, object]) -> Markup:
    """(a drawing of 22 × 12, what it means) each."""
    return el(
        "ul",
        [
            el("li", el("svg", drawn, view_box="0 0 22 12", aria_hidden="true"), el("span", text))
            for drawn, text in entries
        ],
        class_="legend",
    )


def swatch(class_: str) -> Markup:
    """A legend's box in a fill."""
    return el("rect", x=1, y=1, width=20, height=10, rx=1.5, class_=class_)


def stroke(class_: str, *, upright: bool = False) -> Markup:
    """A legend's line."""
    if upright:
        return el("line", x1=11, x2=11, y1=0, y2=12, class_=class_)
    return el("line", x1=1, x2=21, y1=6, y2=6, class_=class_, stroke_width=2.5)


def lane(who: object, below: object, drawn: object, figures: object, said: str, kind: str = "") -> Markup:
    """A row: whose it is, the bar, its figures. ``said``: the same for those who can't see it."""
    return el(
        "li",
        el("div", el("b", who), el("small", below) if below else None, class_="who"),
        el("svg", drawn, role="img", aria_label=said),
        el("div", figures, class_="num"),
        class_=f"lane {kind}".strip(),
    )


def title(text: str) -> Markup:
    """What shows when the pointer rests there."""
    return el("title", text)


def table(heads: Sequence[object], rows: Sequence[Sequence[object]], label: str, best: int = -1) -> Markup:
    """A table whose first column names the rows; scrolls by itself where the screen is narrow."""
    head = el("thead", el("tr", [el("th", text, scope="col") for text in heads]))
    body = [
        el(
            "tr",
            el("th", row[0], scope="row"),
            [el("td", cell) for cell in row[1:]],
            class_="best" if i == best else None,
        )
        for i, row in enumerate(rows)
    ]
    drawn = el("table", head, el("tbody", body))
    return el("div", drawn, class_="scroll", tabindex=0, role="region", aria_label=label)


def groups(report: Report) -> list[tuple[list[Row], str]]:
    """Rows with one and the same plan together, and what to call them: ``heuristic = optimal``."""
    found: list[list[Row]] = []
    for row in report.planned:
        twin = next((rows for rows in found if _same(report, rows[0], row)), None)
        if twin is not None:
            twin.append(row)
        else:
            found.append([row])
    return [(rows, " = ".join(row.strategy for row in rows)) for rows in found]


def _same(report: Report, a: Row, b: Row) -> bool:
    one, other = report.outcome(a.strategy).plan, report.outcome(b.strategy).plan
    if one is None or other is None:
        return False
    return one.stages == other.stages and one.problem == other.problem and a.run_id == b.run_id


def longest_s(report: Report) -> float:
    """What a scale of time must hold that all strategies are drawn on."""
    ends = [row.predicted_s or 0.0 for row in report.planned]
    ends += [row.measured.p90 for row in report.planned if row.measured]
    ends += [share.measured_compute_s or 0.0 for row in report.planned for share in row.shares]
    return max(ends, default=0.0)


def names(text: Sequence[str]) -> Markup:
    """Several names, with commas."""
    return join([join(", " if i else "", name(one)) for i, one in enumerate(text)])
