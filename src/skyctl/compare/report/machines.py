"""The cluster as it was measured: how fast each device is, and each way between two nodes."""

from __future__ import annotations

from skyctl.compare.report import parts
from skyctl.compare.report.facts import LinkCell, LinkMap, Machine, Report
from skyctl.compare.report.markup import Markup, el, join, name
from skyctl.compare.report.scale import Scale, axis, grid
from skyctl.compare.report.units import memory, three

HIGH = 28


def cluster(report: Report) -> Markup:
    """The section."""
    if not report.machines:
        return parts.section(
            "cluster", "The cluster as measured", None, parts.empty("No device was measured.")
        )
    lead = (
        f"{_count(len(report.machines), 'device')}, each timed on the workload's own layers. The bar is how "
        "many samples a second it would train if it held the whole model alone."
    )
    return parts.section("cluster", "The cluster as measured", lead, _devices(report), _links(report.links))


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _devices(report: Report) -> Markup:
    rates = [machine.samples_per_s or 0.0 for machine in report.machines]
    top = max(rates)
    reach = max((_high(machine) for machine in report.machines), default=top)
    scale = Scale(max(top, reach) * 1.02 or 1.0)
    lanes = [_device(machine, scale, top) for machine in report.machines]
    spreads = any(machine.spread for machine in report.machines)
    caption = "Memory is what a stage may use."
    if spreads:
        caption += " The whisker is the spread of the repeated timings: the middle 80% of them lie within it."
    slow = [rate for rate in rates if rate > 0]
    ratio = f"the fastest is {three(top / min(slow))}× the slowest" if len(slow) > 1 else None
    return parts.figure(
        "Speed on this workload",
        ratio,
        el("ul", lanes, class_="lanes"),
        el("div", axis(scale, "samples/s, alone"), class_="axis-lane"),
        [el("ul", [el("li", name(note)) for note in report.notes], class_="said")] if report.notes else None,
        caption=caption,
    )


def _high(machine: Machine) -> float:
    return (machine.samples_per_s or 0.0) * (1 + (machine.spread or 0.0) / 2)


def _device(machine: Machine, scale: Scale, top: float) -> Markup:
    drawn: list[object] = [*grid(scale, HIGH)]
    rate = machine.samples_per_s
    if rate:
        text = f"{machine.label}: {three(rate)} samples/s alone"
        text += f", spread {machine.spread:.0%}" if machine.spread is not None else ""
        drawn.append(
            el("rect", parts.title(text), x=0, y=6, width=scale.wide(rate), height=16, class_="predicted")
        )
        if machine.spread:
            low, high = rate * (1 - machine.spread / 2), _high(machine)
            drawn.append(
                el("line", x1=scale.x(max(0.0, low)), x2=scale.x(high), y1=14, y2=14, class_="whisker")
            )
            drawn += [
                el(
                    "line",
                    x1=scale.x(max(0.0, end)),
                    x2=scale.x(max(0.0, end)),
                    y1=10,
                    y2=18,
                    class_="whisker",
                )
                for end in (low, high)
            ]
    words = [el("b", three(rate)), " samples/s"] if rate else ["not known"]
    share = f"{rate / top:.0%} of the fastest" if rate and top else ""
    figures = [*words, el("small", share), el("small", memory(machine.memory_bytes))]
    below = join(name(machine.what), [join(el("br"), name(note)) for note in machine.notes])
    return parts.lane(name(machine.label), below, drawn, figures, f"{machine.label}: {three(rate)} samples/s")


def _links(links: LinkMap | None) -> Markup:
    if links is None or len(links.names) < 2:
        return parts.figure("Links", None, parts.empty("There is one node only, so there are no links."))
    if not any(cell is not None for row in links.cells for cell in row):
        note = "This profile has no links: every transfer was taken as free (skyctl probe --links all)."
        return parts.figure("Links", None, parts.empty(note))
    head = el("tr", el("th", el("small", "from ↓  to →"), scope="col"), [_head(one) for one in links.names])
    body = [
        el("tr", el("th", name(sender), scope="row"), [_cell(cell) for cell in row])
        for sender, row in zip(links.names, links.cells, strict=True)
    ]
    drawn = el("table", el("thead", head), el("tbody", body), class_="heat")
    return parts.figure(
        "Links by site" if links.by_site else "Links",
        "rows send, columns receive",
        el("div", drawn, class_="scroll", tabindex=0, role="region", aria_label="Links between the nodes"),
        caption=links.key,
    )


def _head(text: str) -> Markup:
    return el("th", name(text), scope="col")


def _cell(cell: LinkCell | None) -> Markup:
    if cell is None:
        return el("td", "·", class_="none", aria_label="itself")
    first, *rest = cell.words
    look = None
    if cell.shade is not None:
        look = f"background:#{bytes(cell.shade).hex()};color:{cell.ink}"
    return el("td", first, [el("small", word) for word in rest], style=look, title=cell.title)
