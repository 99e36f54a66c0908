"""Reports made by hand, from the outcomes of ``conftest.py``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from html.parser import HTMLParser

from skyctl.compare.report.facts import Again, LinkCell, LinkMap, Machine, Report
from skyctl.compare.report.markup import VOID
from skyctl.compare.rows import Outcome
from skyctl.compare.sweeps import Sweep, point, with_measured
from skyctl.control.reporting import gather
from skyctl.records.cluster import Cluster, Node

IDS = ("verdict", "cluster", "maps", "gantt", "prediction", "loss", "bound", "certificate", "sweeps", "again")
AGAIN = Again(
    (("The whole comparison:", "skyctl compare gpt:layers=6 --measure"),), (("skyctl", "0.1"), ("seed", "0"))
)


def made(outcomes: Sequence[Outcome], *, full: bool = False) -> Report:
    """Gathered without a profile; ``full``: with links, spreads and both sweeps, too."""
    cluster = Cluster(name="home", nodes=(Node(name="tower", transport="local"),))
    report = gather(
        outcomes,
        None,
        cluster=cluster,
        workload="gpt:layers=6",
        again=AGAIN,
        created=datetime(2026, 11, 22, 3, 4, tzinfo=UTC),
    )
    if not full:
        return report
    cell = LinkCell(("941", "0.20 ms"), "tower → laptop: 941 Mbit/s", (33, 145, 140), "white")
    links = LinkMap(("tower", "laptop"), ((None, cell), (LinkCell(("✗",), "no connection"), None)), "Mbit/s")
    machines = [
        Machine(m.device, m.label, "AMD EPYC, 1 thread", m.samples_per_s, 0.12, 8e9) for m in report.machines
    ]
    nodes = Sweep(
        kind="nodes",
        points=(point(1, outcomes, nodes=("tower",)), point(2, outcomes, added="laptop")),
        chosen=2,
    )
    batches = Sweep(kind="microbatches", points=(point(4, outcomes), point(8, outcomes)), chosen=4)
    sweeps = (with_measured(batches, report.rows), nodes)
    return replace(report, links=links, machines=machines, sweeps=sweeps)


class Reader(HTMLParser):
    """What stands in a page. ``faults``: tags that do not match."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.faults: list[str] = []
        self.ids: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str, str]] = []
        self.words = ""
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
