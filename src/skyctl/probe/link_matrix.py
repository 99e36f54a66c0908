"""The links as a map: rows send, columns receive. Colour says the rate; the figures say it without colour."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from rich import box
from rich.table import Table
from rich.text import Text

from skyctl.records.profile import LinkProfile, Profile

MOST_NODES = 24
"""With more nodes the map is of their sites."""
COLUMN_CHARS = 8
"""Characters of a column, about."""
MOST_LINES = 6
"""So many pairs are named below it, of those without a connection and of those that a median hides."""
SLOW_SHARE = 0.5
"""A pair slower than this part of its sites' median is named."""
COLOUR_RAMP = ((253, 231, 37), (94, 201, 98), (33, 145, 140), (59, 82, 139), (68, 1, 84))
"""Viridis, fast to slow: ordered in lightness too, for colour-blind eyes and for grey."""


@dataclass(frozen=True)
class LinkSummaryCell:
    """One direction. None and None: no link of it gave figures."""

    mbit: float | None = None
    latency_ms: float | None = None
    estimated: bool = False


@dataclass(frozen=True)
class LinkSummary:
    """A square of cells by (row, column), and what rows and columns are called."""

    names: tuple[str, ...]
    cells: tuple[tuple[LinkSummaryCell | None, ...], ...]
    by_site: bool

    def span(self) -> tuple[float, float]:
        """The least and the greatest rate, 1 and 1 where there is none."""
        rates = [cell.mbit for row in self.cells for cell in row if cell is not None and cell.mbit]
        return (min(rates), max(rates)) if rates else (1.0, 1.0)


def summarize_links(profile: Profile, most: int = MOST_NODES) -> LinkSummary:
    """By node; with more than ``most`` nodes by site, each cell the median of its links."""
    names = [node.name for node in profile.nodes]
    between: dict[tuple[str, str], list[LinkProfile]] = {}
    by_site = len(names) > most and bool(profile.sites)
    place = {name: site.name for site in profile.sites for name in site.nodes} if by_site else {}
    for link in profile.links:
        between.setdefault(
            (place.get(link.source, link.source), place.get(link.target, link.target)), []
        ).append(link)
    rows = [site.name for site in profile.sites] if by_site else names
    return LinkSummary(
        tuple(rows), tuple(tuple(_cell(between.get((a, b), [])) for b in rows) for a in rows), by_site
    )


def most_columns(width: int | None) -> int:
    """How many nodes' columns a terminal of that width has room for (None: any)."""
    return MOST_NODES if width is None else max(2, min(MOST_NODES, (width - 12) // COLUMN_CHARS))


def matrix_table(summary: LinkSummary) -> Table:
    """The matrix with colours, for a terminal."""
    low, high = summary.span()
    title = "Links by site" if summary.by_site else "Links"
    table = Table(title=title, title_justify="left", padding=(0, 0), box=box.SIMPLE)
    table.add_column("", no_wrap=True)
    for name in summary.names:
        table.add_column(Text(name), justify="right", no_wrap=True)
    for name, row in zip(summary.names, summary.cells, strict=True):
        table.add_row(Text(name), *(_coloured_cell(cell, low, high) for cell in row))
    return table


LEGEND = "from row to column: Mbit/s, below it ms one way; yellow is fast; ~ filled in from other links"


def matrix_lines(summary: LinkSummary) -> list[str]:
    """For a pipe: one line a site pair, where the map is by site (by node, the links say it all)."""
    if not summary.by_site:
        return []
    return [
        f"site link {a} -> {b}: {cell.latency_ms:.2f} ms, {rate_text(cell.mbit)} Mbit/s (median)"
        for a, row in zip(summary.names, summary.cells, strict=True)
        for b, cell in zip(summary.names, row, strict=True)
        if cell is not None and cell.mbit is not None and cell.latency_ms is not None
    ]


def failed_link_lines(profile: Profile) -> list[str]:
    """The pairs without a connection and why, once where it is the same both ways."""
    reasons = {(link.source, link.target): link.error for link in profile.links if link.error is not None}
    lines: list[str] = []
    reported: set[tuple[str, str]] = set()
    for (a, b), why in reasons.items():
        both = reasons.get((b, a)) == why
        if not (both and (b, a) in reported):
            lines.append(f"{a} {'↔' if both else '→'} {b}: {why}")
        reported.add((a, b))
    return _shortened(lines)


def slow_link_lines(profile: Profile, summary: LinkSummary) -> list[str]:
    """Lines on what a map's medians by site hide: least and greatest rate, and which pairs are slow.

    Only where a pair is much slower than the median, but always where all nodes are one site.
    """
    if not summary.by_site:
        return []
    lines = []
    place = {name: site.name for site in profile.sites for name in site.nodes}
    cells: dict[tuple[str, str], list[tuple[float, str]]] = {}
    for link in profile.links:
        if link.bandwidth_bytes_per_s is not None and not link.estimated:
            ends = place.get(link.source, link.source), place.get(link.target, link.target)
            way = f"{link.source} → {link.target}"
            cells.setdefault(ends, []).append((link.bandwidth_bytes_per_s / 125_000, way))
    for (a, b), rates in cells.items():
        rates.sort()
        middle = median(rate for rate, _ in rates)
        slow = [f"{way} {rate_text(rate)}" for rate, way in rates if rate < SLOW_SHARE * middle]
        if slow or len(summary.names) == 1:
            where = f"within {a}" if a == b else f"{a} → {b}"
            low, high = rate_text(rates[0][0]), rate_text(rates[-1][0])
            words = f"{where}: {low} to {high} Mbit/s, median {rate_text(middle)}"
            lines.append(words + (f"; slow: {', '.join(_shortened(slow))}" if slow else ""))
    return _shortened(lines)


def _shortened(lines: list[str]) -> list[str]:
    more = len(lines) - MOST_LINES
    return lines if more <= 0 else [*lines[:MOST_LINES], f"and {more} more"]


def colour(mbit: float, low: float, high: float) -> tuple[int, int, int]:
    """Red, green, blue, by the rate's logarithm between the least and the greatest."""
    part = 1.0 if high <= low else math.log(mbit / low) / math.log(high / low)
    at = (1.0 - min(1.0, max(0.0, part))) * (len(COLOUR_RAMP) - 1)
    lower = min(int(at), len(COLOUR_RAMP) - 2)
    pairs = zip(COLOUR_RAMP[lower], COLOUR_RAMP[lower + 1], strict=True)
    red, green, blue = (round(a + (b - a) * (at - lower)) for a, b in pairs)
    return red, green, blue


def text_colour(shade: Sequence[int]) -> str:
    """Black or white, whichever can be read on that colour (ITU-R BT.601 luma)."""
    return "black" if 0.299 * shade[0] + 0.587 * shade[1] + 0.114 * shade[2] > 128 else "white"


def rate_text(mbit: float) -> str:
    """Three digits at most: ``4.98``, ``98.4``, ``945``, ``9.4G``."""
    return f"{mbit / 1000:.3g}G" if mbit >= 999.5 else f"{mbit:.3g}"


def latency_text(milliseconds: float) -> str:
    """Milliseconds in three digits at most: ``0.08``, ``5.1``, ``50``."""
    return f"{milliseconds:.2f}" if milliseconds < 0.995 else f"{milliseconds:.3g}"


def _cell(links: Sequence[LinkProfile]) -> LinkSummaryCell | None:
    if not links:
        return None
    figures = [(k.bandwidth_bytes_per_s, k.latency_s) for k in links]
    rates = [rate / 125_000 for rate, _ in figures if rate is not None]
    latencies = [latency * 1e3 for _, latency in figures if latency is not None]
    if not rates or not latencies:
        return LinkSummaryCell()
    return LinkSummaryCell(median(rates), median(latencies), all(k.estimated for k in links))


def _coloured_cell(cell: LinkSummaryCell | None, low: float, high: float) -> Text:
    if cell is None:
        return Text("·", style="dim")
    if cell.mbit is None or cell.latency_ms is None:
        return Text("✗", style="bold red")
    shade = colour(cell.mbit, low, high)
    words = ("~" if cell.estimated else "") + rate_text(cell.mbit)
    lines = [words, latency_text(cell.latency_ms)]
    wide = max(6, *(len(line) for line in lines))
    return Text(
        "\n".join(line.rjust(wide) for line in lines), style=f"{text_colour(shade)} on #{bytes(shade).hex()}"
    )
