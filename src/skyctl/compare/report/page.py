"""The whole page: one file, no script, nothing loaded from anywhere."""

from __future__ import annotations

from skyctl.compare.report import parts
from skyctl.compare.report.bound import bound, certificates
from skyctl.compare.report.changing import sweeps
from skyctl.compare.report.facts import Report
from skyctl.compare.report.gantt import gantt
from skyctl.compare.report.losses import losses
from skyctl.compare.report.machines import cluster
from skyctl.compare.report.maps import maps
from skyctl.compare.report.markup import Markup, el, join, name
from skyctl.compare.report.opening import opening, summary
from skyctl.compare.report.prediction import prediction
from skyctl.compare.report.style import sheet
from skyctl.compare.verdict import verdict

SECTIONS = (
    ("cluster", "Cluster", cluster),
    ("maps", "Layers", maps),
    ("gantt", "One step", gantt),
    ("prediction", "Predicted and measured", prediction),
    ("loss", "Loss", losses),
    ("bound", "Bound", bound),
    ("certificate", "Certificates", certificates),
    ("sweeps", "Sweeps", sweeps),
)
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""For the browser: nothing may be loaded or run, whatever stands in the page."""


def page(report: Report) -> str:
    """The report as HTML."""
    about = f"{verdict(report.rows)}: {report.workload} on {report.cluster}"
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", http_equiv="Content-Security-Policy", content=POLICY),
        el("meta", name="color-scheme", content="light dark"),
        el("meta", name="generator", content="skyctl"),
        el("meta", name="description", content=about),
        el("link", rel="icon", href="data:,"),
        el("title", f"{report.workload} on {report.cluster} · skyctl compare"),
        el("style", Markup(sheet())),
    )
    links = [("verdict", "Verdict"), *((ident, called) for ident, called, _ in SECTIONS), ("again", "Again")]
    nav = el(
        "nav",
        el("ul", [el("li", el("a", called, href=f"#{ident}")) for ident, called in links]),
        aria_label="Sections",
    )
    body = el(
        "body",
        _patterns(),
        el("header", opening(report), nav),
        el("main", summary(report), [made(report) for _, _, made in SECTIONS], again(report)),
        el(
            "footer", f"Written by skyctl on {report.created}. This file needs no network and runs no script."
        ),
    )
    return f"<!doctype html>\n{el('html', head, body, lang='en')}\n"


def again(report: Report) -> Markup:
    """How to get the same: commands, versions, seeds."""
    commands = [el("li", el("p", why), el("pre", el("code", text))) for why, text in report.again.commands]
    facts = [join(el("dt", term), el("dd", name(text))) for term, text in report.again.facts]
    lead = "The plans lie beside this page: commands that name one are for its folder."
    return parts.section(
        "again",
        "How to reproduce this",
        lead if commands else None,
        el("ol", commands, class_="steps") if commands else None,
        parts.figure("What it was made with", None, el("dl", facts, class_="facts")) if facts else None,
    )


def _patterns() -> Markup:
    """The hatching, which all figures use."""
    line = el("path", d="M-1 1L1 -1M0 6L6 0M5 7L7 5", class_="hatch-line")
    pattern = el("pattern", line, id="hatch", width=6, height=6, **{"patternUnits": "userSpaceOnUse"})
    return el("svg", el("defs", pattern), width=0, height=0, style="position:absolute", aria_hidden="true")
