"""Reports made by hand, from the outcomes of ``conftest.py``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from html.parser import HTMLParser

from skyctl.compare.charts.chart import MatrixCell, MatrixChart
from skyctl.compare.outcome import StrategyOutcome
from skyctl.compare.report_data import ComparisonReport, DeviceSpeed, Reproduction
from skyctl.compare.sweeps import ComparisonSweep, NodesPoint, add_measured_steps, nodes_sweep, sweep_point
from skyctl.jobs.report_builder import build_report
from skyctl.records.cluster import Cluster, Node

IDS = ("verdict", "cluster", "maps", "gantt", "prediction", "loss", "bound", "certificate", "sweeps", "again")
VOID = frozenset({"meta", "link", "br"})
"""Elements of HTML that have no end."""
AGAIN = Reproduction(
    (("The whole comparison:", "skyctl compare gpt:layers=6 --measure"),), (("skyctl", "0.1"), ("seed", "0"))
)


def make_report(outcomes: Sequence[StrategyOutcome], *, full: bool = False) -> ComparisonReport:
    """Gathered without a profile; ``full``: with links, spreads and both sweeps, too."""
    cluster = Cluster(name="home", nodes=(Node(name="tower", transport="local"),))
    report = build_report(
        outcomes,
        None,
        cluster=cluster,
        workload="gpt:layers=6",
        reproduction=AGAIN,
        created=datetime(2026, 11, 22, 3, 4, tzinfo=UTC),
    )
    if not full:
        return report
    cell = MatrixCell(("941", "0.20 ms"), "tower → laptop: 941 Mbit/s", (33, 145, 140), "white")
    links = MatrixChart(
        "Links", ("tower", "laptop"), ((None, cell), (MatrixCell(("✗",), "no connection"), None)), "Mbit/s"
    )
    devices = [
        DeviceSpeed(m.device, m.label, "AMD EPYC, 1 thread", m.samples_per_s, 0.12, 8e9)
        for m in report.devices
    ]
    planned = [replace(outcome, measurement=None) for outcome in outcomes]
    nodes = nodes_sweep([NodesPoint(("tower",), planned), NodesPoint(("tower", "laptop"), planned)], 2)
    batches = ComparisonSweep(
        kind="microbatches", points=(sweep_point(4, planned), sweep_point(8, planned)), chosen=4
    )
    sweeps = (add_measured_steps(batches, report.rows), nodes)
    return replace(report, links=links, devices=devices, sweeps=sweeps)


class Reader(HTMLParser):
    """The contents of a page. ``faults``: tags that do not match."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.faults: list[str] = []
        self.ids: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str, str]] = []
        self.words = ""
        self.lines: list[str] = []
        self.feed(text)
        self.close()
        self.faults += [f"{tag} is not closed" for tag in self.open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(tag, key, value or "") for key, value in attrs]
        self.ids += [value or "" for key, value in attrs if key == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"</{tag}> at {self.getpos()}")

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words += data
            self.lines += [" ".join(data.split())] if data.strip() else []
