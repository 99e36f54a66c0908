"""Charts of a plan's routes: the links between those that sum, and each route's two trees over them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from skyctl.compare.charts.chart import ChartGroup, LegendEntry
from skyctl.compare.charts.matplotlib_canvas import device_names
from skyctl.compare.charts.network_chart import (
    Anchor,
    NetworkChart,
    NetworkLine,
    NetworkNode,
    NetworkText,
)
from skyctl.compare.number_format import format_percent
from skyctl.compare.outcome import device_labels
from skyctl.records.plan import Plan
from skyctl.records.problem import Problem
from skyctl.records.sync import Route

MAX_ROUTES = 5
"""Routes drawn, at most: those of the largest shares. There are as many colours."""
ROW_CHARTS = 3
MAX_RATED_NODES = 8
"""With more nodes at one place, rates are not written at each link."""
MAX_NAMED_NODES = 32
"""With more nodes only roots are named."""
MAX_SHARED_NAMED = 4
"""Lines that several links share, named at most."""
MAX_NAME = 9
"""Characters of a name."""
WIDTH, HEIGHT = 320.0, 250.0
NODE_RADIUS, ROOT_RADIUS = 6.0, 8.0
LANE = 3.5
"""Pixels that an arrow keeps to the right of the middle, so that what comes the other way is not under it."""
RATE_AT = 0.36
"""How far along a link its rate is written: not in the middle, where diagonals cross."""


@dataclass(frozen=True)
class _Map:
    """By device id, where it is, in pixels, and in which direction from there (``outward``) its name is."""

    problem: Problem
    sites: tuple[tuple[str, ...], ...]
    place: Mapping[str, tuple[float, float]]
    outward: Mapping[str, tuple[float, float]]
    names: Mapping[str, str]


def route_charts(plan: Plan, sites: Sequence[Sequence[str]]) -> ChartGroup:
    """The links, then the largest routes, each over the same map; no charts where nothing is summed.

    Args:
        sites: every device of a route once, with those that are near to it, in the order around the map.
    """
    if plan.sync is None:
        return ChartGroup(())
    chart_map = _place(plan.problem, sites)
    routes = sorted(plan.sync.groups[0].routes, key=lambda route: -route.share)
    drawn, rest = routes[:MAX_ROUTES], routes[MAX_ROUTES:]
    charts = [_link_chart(chart_map), *(_route_chart(chart_map, i, one) for i, one in enumerate(drawn))]
    legend = [
        LegendEntry("line", "way-up", "partial sums, up to the root"),
        LegendEntry("line", "way-down", "the sum, down from it"),
        LegendEntry("dot", "holder", "holds the model"),
    ]
    holders = {stage.device for stage in plan.placed_stages}
    if any(device not in holders for site in sites for device in site):
        legend.append(LegendEntry("dot", "helper", "adds for the others"))
    rows = tuple(tuple(charts[i : i + ROW_CHARTS]) for i in range(0, len(charts), ROW_CHARTS))
    notes = [_left_out(rest)] if rest else []
    return ChartGroup(rows, tuple(legend), (*notes, *_notes(chart_map)))


def _left_out(routes: Sequence[Route]) -> str:
    share = format_percent(sum(route.share for route in routes), sign=False)
    more = f"{len(routes)} more routes" if len(routes) > 1 else "one more route"
    return f"Not drawn: {more} with {share} of the bytes, each with less than those above or as much."


def _notes(chart_map: _Map) -> list[str]:
    """What else there is to know of the links: those that share a line, and what is not written."""
    on_map = set(chart_map.place)
    shared = [
        f"{resource.name} {_rate(resource.bandwidth_bytes_per_s)}"
        for resource in chart_map.problem.shared
        if sum(set(link) <= on_map for link in resource.links) > 1
    ]
    notes = []
    if shared:
        more = f" and {len(shared) - MAX_SHARED_NAMED} more" if len(shared) > MAX_SHARED_NAMED else ""
        notes.append(f"Shared by several links, Mbit/s: {', '.join(shared[:MAX_SHARED_NAMED])}{more}.")
    if len(chart_map.sites) == 1 and len(on_map) > MAX_RATED_NODES:
        notes.append(f"With more than {MAX_RATED_NODES} nodes links have no figures: thicker is faster.")
    if len(on_map) > MAX_NAMED_NODES:
        notes.append(f"With more than {MAX_NAMED_NODES} nodes only roots are named.")
    return notes


def _place(problem: Problem, sites: Sequence[Sequence[str]]) -> _Map:
    """Each site's devices on a circle, the sites around the middle; two of either are beside each other."""
    place, outward = {}, {}
    middle = WIDTH / 2, HEIGHT / 2
    several = len(sites) > 1
    for (dx, dy), site in zip(_around(len(sites)), sites, strict=True):
        centre = (middle[0] + several * 92 * dx, middle[1] + several * 68 * dy)
        reach = (36.0 if len(sites) <= 6 else 22.0) if several else 84.0
        for (ux, uy), device in zip(_around(len(site)), site, strict=True):
            single = several and len(site) == 1
            place[device] = centre if single else (centre[0] + reach * ux, centre[1] + reach * uy)
            outward[device] = (dx, dy) if single else (ux, uy)
    labels = device_labels(problem)
    called = device_names([labels[device] for device in place], MAX_NAME)
    return _Map(
        problem,
        tuple(tuple(site) for site in sites),
        place,
        outward,
        {device: called[labels[device]] for device in place},
    )


def _around(count: int) -> list[tuple[float, float]]:
    """Directions to so many places, clockwise; of an even number none is straight above or below."""
    first = -math.pi / 2 - (math.pi / count if count % 2 == 0 else 0)
    if count == 2:
        first = math.pi
    turns = [first + 2 * math.pi * i / count for i in range(count)]
    return [(math.cos(turn), math.sin(turn)) for turn in turns]


def _link_chart(chart_map: _Map) -> NetworkChart:
    """What the links carry: at each link where nodes are few, else between sites."""
    rates = _rates(chart_map)
    fastest = max(rates.values(), default=1.0)
    lines, texts = [], list(_names(chart_map, ()))
    sites = chart_map.sites
    place = chart_map.place
    for site in sites:
        for i, a in enumerate(site):
            for b in site[i + 1 :]:
                both = rates.get((a, b)), rates.get((b, a))
                lines.append(_link_line(place[a], place[b], both, fastest))
                if len(sites) == 1 and len(site) <= MAX_RATED_NODES:
                    texts += _rate_texts(place[a], place[b], both)
        if len(sites) > 1 and len(site) > 1:
            inside = [rates[a, b] for a in site for b in site if (a, b) in rates]
            texts += [NetworkText(*_centre(chart_map, site), _range(inside), muted=True, backed=True)]
    for i, one in enumerate(sites):
        for other in sites[i + 1 :]:
            ways = [
                [rates[a, b] for a in x for b in y if (a, b) in rates]
                for x, y in ((one, other), (other, one))
            ]
            ends = _centre(chart_map, one), _centre(chart_map, other)
            if len(sites) > 1 and any(ways):
                edges = _trimmed(*ends, *(0.0 if len(site) == 1 else 44.0 for site in (one, other)))
                lines.append(_link_line(*edges, tuple(max(way, default=None) for way in ways), fastest))
                texts += _rate_texts(*edges, tuple(_range(way) for way in ways))
    nodes = tuple(_node(chart_map, device) for device in place)
    alt = "; ".join(
        f"{chart_map.names[a]} to {chart_map.names[b]} {_rate(rate)}" for (a, b), rate in rates.items()
    )
    return NetworkChart(
        "Links, Mbit/s",
        tuple(lines),
        nodes,
        tuple(texts),
        f"Mbit/s: {alt}" if alt else "No links",
        WIDTH,
        HEIGHT,
    )


def _route_chart(chart_map: _Map, number: int, route: Route) -> NetworkChart:
    """A route's tree up to its root, and the one down from it, in a colour of their own."""
    look = f"route{number}"
    share = format_percent(route.share, sign=False)
    name = chart_map.names[route.root]
    lines = [NetworkLine(*a, *b, "grid", 1.0) for a, b in _background(chart_map)]
    for edges, dashed, what in ((route.up, False, "up"), (route.down, True, "down")):
        for source, target in edges:
            ends = _trimmed(chart_map.place[source], chart_map.place[target], 9.0, 10.0)
            way = f"{what}: {chart_map.names[source]} → {chart_map.names[target]}, {share} of the bytes"
            lines.append(_beside(*ends, look, dashed=dashed, tooltip=way))
    on_route = {device for edge in (*route.up, *route.down) for device in edge}
    nodes = tuple(
        _node(chart_map, device, look if device == route.root else "", left_out=device not in on_route)
        for device in chart_map.place
    )
    alt = (
        f"{share} of the bytes by {name}: up "
        + ", ".join(" to ".join(chart_map.names[x] for x in edge) for edge in route.up)
        + "; down "
        + ", ".join(" to ".join(chart_map.names[x] for x in edge) for edge in route.down)
    )
    texts = tuple(_names(chart_map, (route.root,)))
    return NetworkChart(f"{share} at {name}", tuple(lines), nodes, texts, alt, WIDTH, HEIGHT)


def _rates(chart_map: _Map) -> dict[tuple[str, str], float]:
    """By directed pair on the map, bytes a second."""
    return {
        (link.source, link.target): link.bandwidth_bytes_per_s
        for link in chart_map.problem.links
        if link.source in chart_map.place and link.target in chart_map.place
    }


def _background(chart_map: _Map) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """The links that a route's panel shows pale; none where they would be more than can be seen."""
    if len(chart_map.place) > MAX_RATED_NODES:
        return []
    pairs = {(min(pair), max(pair)) for pair in _rates(chart_map)}
    return [(chart_map.place[a], chart_map.place[b]) for a, b in sorted(pairs)]


def _link_line(
    a: tuple[float, float], b: tuple[float, float], rates: Sequence[float | None], fastest: float
) -> NetworkLine:
    """As thick as the link is fast; one that is not in the problem is free, and thin."""
    known = [rate for rate in rates if rate is not None]
    width = 0.8 + 3.2 * math.sqrt(max(known) / fastest) if known else 0.8
    return NetworkLine(*a, *b, "link", width)


def _rate_texts(
    a: tuple[float, float], b: tuple[float, float], rates: Sequence[float | str | None]
) -> list[NetworkText]:
    """One figure where both ways are alike, else each near the end that sends."""
    first, second = (_rate(x) if isinstance(x, float) else x or "free" for x in rates)
    if first == second:
        return [NetworkText(*_along(a, b, RATE_AT), first, muted=True, backed=True)]
    return [
        NetworkText(*_along(*ends, 0.28), text, muted=True, backed=True)
        for ends, text in (((a, b), f"{first} →"), ((b, a), f"← {second}"))
    ]


def _names(chart_map: _Map, roots: Sequence[str]) -> list[NetworkText]:
    """A name beside each node, on the side away from the middle of its site."""
    texts = []
    for device, (x, y) in chart_map.place.items():
        if len(chart_map.place) > MAX_NAMED_NODES and device not in roots:
            continue
        dx, dy = chart_map.outward[device]
        anchor: Anchor = "middle" if abs(dx) < 0.4 else "start" if dx > 0 else "end"
        texts.append(NetworkText(x + 12 * dx, y + 15 * dy, chart_map.names[device], anchor))
    return texts


def _node(chart_map: _Map, device: str, look: str = "", *, left_out: bool = False) -> NetworkNode:
    x, y = chart_map.place[device]
    usual = "left-out" if left_out else "holder"
    return NetworkNode(x, y, ROOT_RADIUS if look else NODE_RADIUS, look or usual, device)


def _beside(
    a: tuple[float, float], b: tuple[float, float], look: str, *, dashed: bool, tooltip: str
) -> NetworkLine:
    """An arrow a little to the right of the straight way, as one drives."""
    length = math.dist(a, b) or 1.0
    shift = -(b[1] - a[1]) / length * LANE, (b[0] - a[0]) / length * LANE
    return NetworkLine(
        a[0] + shift[0],
        a[1] + shift[1],
        b[0] + shift[0],
        b[1] + shift[1],
        look,
        2.0,
        arrow=True,
        dashed=dashed,
        tooltip=tooltip,
    )


def _centre(chart_map: _Map, site: Sequence[str]) -> tuple[float, float]:
    places = [chart_map.place[device] for device in site]
    return sum(x for x, _ in places) / len(places), sum(y for _, y in places) / len(places)


def _along(a: tuple[float, float], b: tuple[float, float], part: float) -> tuple[float, float]:
    return a[0] + part * (b[0] - a[0]), a[1] + part * (b[1] - a[1])


def _trimmed(
    a: tuple[float, float], b: tuple[float, float], before: float, after: float
) -> tuple[tuple[float, float], tuple[float, float]]:
    """The same way, shorter by so many pixels at each end."""
    length = math.dist(a, b) or 1.0
    return _along(a, b, before / length), _along(a, b, 1 - after / length)


def _rate(bytes_per_s: float) -> str:
    """Mbit/s in three figures at most."""
    mbit = bytes_per_s * 8e-6
    return f"{mbit:.0f}" if mbit >= 100 else f"{mbit:.3g}"


def _range(rates: Sequence[float]) -> str:
    if not rates:
        return "free"
    low, high = _rate(min(rates)), _rate(max(rates))
    return low if low == high else f"{low}–{high}"
