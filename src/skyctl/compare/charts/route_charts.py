"""Charts of a plan's routes: the links between those that sum, and each route's two trees over them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations, product

from skyctl.compare.charts.chart import ChartGroup, LegendEntry
from skyctl.compare.charts.device_names import device_names
from skyctl.compare.charts.network_chart import (
    Anchor,
    NetworkChart,
    NetworkLine,
    NetworkNode,
    NetworkText,
)
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
"""With more nodes only roots are named, and all are smaller."""
MAX_LINKED_NODES = 24
"""With more nodes at one place, the links between them are not drawn."""
MAX_SHARED_NAMED = 8
"""Lines that several links share, named at most."""
MAX_NAME = 9
"""Characters of a name."""
WIDTH = 320.0
MARGIN = 28.0
"""Pixels above the uppermost node and below the lowest one."""
REACH, WIDE_REACH = 84.0, 112.0
"""Pixels from the middle to the nodes where all are one site: few of them, and many."""
SITE_REACH = 38.0
"""Pixels from the middle of one of several sites to its nodes."""
TURN = 0.3
"""By how much a site's circle is turned, in radians, so that no three nodes of two sites are in a line."""
NODE_RADIUS, SMALL_RADIUS = 6.0, 3.0
LANE = 3.5
"""Pixels that an arrow keeps to the right of the middle, so that what comes the other way is not under it."""
RATE_AT = 0.26
"""How far along a link its rate is written: not in the middle, where diagonals cross."""

Point = tuple[float, float]
_Rates = dict[tuple[str, str], float]


@dataclass(frozen=True)
class _Map:
    """By device id, where it is, in pixels, and in which direction from there (``outward``) its name is."""

    problem: Problem
    sites: tuple[tuple[str, ...], ...]
    place: Mapping[str, Point]
    outward: Mapping[str, Point]
    names: Mapping[str, str]
    helpers: frozenset[str]
    height: float

    @property
    def radius(self) -> float:
        """Of a node, in pixels."""
        return SMALL_RADIUS if len(self.place) > MAX_NAMED_NODES else NODE_RADIUS

    @property
    def crowded(self) -> bool:
        """Whether one site has more links than can be told from each other."""
        return max(len(site) for site in self.sites) > MAX_LINKED_NODES


def route_charts(plan: Plan, sites: Sequence[Sequence[str]]) -> ChartGroup:
    """The links, then the largest routes, each over the same map; no charts where nothing is summed.

    Of several groups of layers the first one's are drawn.

    Args:
        sites: every device of a route once, with those that are near to it, in the order around the map.
    """
    if plan.sync is None:
        return ChartGroup(())
    legend = [
        LegendEntry("line", "way-up", "partial sums, up to the root"),
        LegendEntry("line", "way-down", "the sum, down from it"),
        LegendEntry("dot", "root", "the root, in the route's colour"),
    ]
    if plan.helpers:
        legend.append(LegendEntry("dot", "helper", "a helper: adds, and holds no layers"))
    chart_map = _place(plan.problem, sites, plan.helpers)
    routes = sorted(plan.sync.groups[0].routes, key=lambda route: -route.share)
    drawn, rest = routes[:MAX_ROUTES], routes[MAX_ROUTES:]
    charts = [_link_chart(chart_map), *(_route_chart(chart_map, i, route) for i, route in enumerate(drawn))]
    rows = tuple(tuple(charts[i : i + ROW_CHARTS]) for i in range(0, len(charts), ROW_CHARTS))
    notes = [_left_out(rest)] if rest else []
    first, *others = plan.sync.groups
    if others:
        notes.append(
            f"Drawn: the routes of layers {first.start}:{first.stop}; other layers have routes of their own."
        )
    return ChartGroup(rows, tuple(legend), (*notes, *_notes(chart_map)))


def _left_out(routes: Sequence[Route]) -> str:
    share = _share(sum(route.share for route in routes))
    more = f"{len(routes)} more routes" if len(routes) > 1 else "one more route"
    return f"Not drawn: {more}, {share} of the bytes; none has a larger share than those drawn."


def _notes(chart_map: _Map) -> list[str]:
    """Further notes on the links: those that share a line, and what is not written."""
    on_map, rates = set(chart_map.place), _rates(chart_map)
    shared = [
        f"{resource.name} {_rate(resource.bandwidth_bytes_per_s)}"
        for resource in chart_map.problem.shared
        if sum(set(link) <= on_map for link in resource.links) > 1
    ]
    notes = []
    if len(on_map) <= MAX_RATED_NODES and any(rates.get((b, a)) != rate for (a, b), rate in rates.items()):
        notes.append("Of two figures at a link each is near the end that sends.")
    if shared:
        more = f" and {len(shared) - MAX_SHARED_NAMED} more" if len(shared) > MAX_SHARED_NAMED else ""
        notes.append(f"Shared by several links, Mbit/s: {', '.join(shared[:MAX_SHARED_NAMED])}{more}.")
    carry = _range(list(rates.values()))
    if chart_map.crowded:
        notes.append(f"Links between so many nodes are not drawn; they carry {carry} Mbit/s.")
    elif len(chart_map.sites) == 1 and len(on_map) > MAX_RATED_NODES:
        notes.append(f"Links between so many nodes have no figures ({carry} Mbit/s): thicker is faster.")
    if len(on_map) > MAX_NAMED_NODES:
        notes.append(f"With more than {MAX_NAMED_NODES} nodes only roots are named.")
    return notes


def _place(problem: Problem, sites: Sequence[Sequence[str]], helpers: Sequence[str]) -> _Map:
    """Each site's devices on a circle, the sites around the middle."""
    place, outward = {}, {}
    several = len(sites) > 1
    spread = 92.0 if len(sites) <= 6 else 112.0
    for (dx, dy), site in zip(_around(len(sites)), sites, strict=True):
        centre = (WIDTH / 2 + several * spread * dx, several * 0.85 * spread * dy)
        reach = SITE_REACH if several else WIDE_REACH if len(site) > MAX_NAMED_NODES else REACH
        ways = _around(len(site), math.atan2(dy, dx) + TURN) if several else _around(len(site))
        for (ux, uy), device in zip(ways, site, strict=True):
            single = several and len(site) == 1
            place[device] = centre if single else (centre[0] + reach * ux, centre[1] + reach * uy)
            outward[device] = (dx, dy) if single else (ux, uy)
    top = min(y for _, y in place.values()) - MARGIN
    bottom = max(y for _, y in place.values()) + MARGIN
    labels = device_labels(problem)
    called = device_names([labels[device] for device in place], MAX_NAME)
    return _Map(
        problem,
        tuple(tuple(site) for site in sites),
        {device: (x, y - top) for device, (x, y) in place.items()},
        outward,
        {device: called[labels[device]] for device in place},
        frozenset(helpers),
        bottom - top,
    )


def _around(count: int, first: float | None = None) -> list[Point]:
    """Directions to so many places, clockwise from ``first``, an angle.

    Left out, one is straight above, of an even number two; of two places one is at each side.
    """
    if first is None:
        first = -math.pi / 2 - (math.pi / count if count % 2 == 0 else 0)
        first = math.pi if count == 2 else first
    turns = [first + 2 * math.pi * i / count for i in range(count)]
    return [(math.cos(turn), math.sin(turn)) for turn in turns]


def _link_chart(chart_map: _Map) -> NetworkChart:
    """The chart of what the links carry: at each link where nodes are few, else between sites."""
    rates = _rates(chart_map)
    lines, texts = [], list(_names(chart_map, ()))
    for site in chart_map.sites:
        lines += _site_lines(chart_map, site, rates)
        if len(chart_map.sites) > 1 and len(site) > 1:
            inside = [rates[pair] for pair in permutations(site, 2) if pair in rates]
            texts.append(_figure(_centre(chart_map, site), _range(inside)))
        elif len(chart_map.sites) == 1 and len(site) <= MAX_RATED_NODES:
            for a, b in combinations(site, 2):
                both = [_range([rates[way]] if way in rates else []) for way in ((a, b), (b, a))]
                texts += _rate_texts(chart_map.place[a], chart_map.place[b], both)
    for first, other in combinations(chart_map.sites, 2):
        ways = [
            [rates[pair] for pair in product(*ends) if pair in rates]
            for ends in ((first, other), (other, first))
        ]
        gaps = [0.0 if len(site) == 1 else SITE_REACH + 6 for site in (first, other)]
        edges = _trimmed(_centre(chart_map, first), _centre(chart_map, other), *gaps)
        lines.append(_link_line(*edges, [rate for way in ways for rate in way], rates))
        texts += _rate_texts(*edges, [_range(way) for way in ways])
    nodes = tuple(_node(chart_map, device) for device in chart_map.place)
    alt = "; ".join(
        f"{chart_map.names[a]} to {chart_map.names[b]} {_range([x])}" for (a, b), x in rates.items()
    )
    if len(nodes) > MAX_RATED_NODES:
        alt = f"{len(rates)} links of {_range(list(rates.values()))}"
    title = "Links, Mbit/s"
    return NetworkChart(
        title, tuple(lines), nodes, tuple(texts), f"{title}: {alt or 'none'}", WIDTH, chart_map.height
    )


def _site_lines(chart_map: _Map, site: Sequence[str], rates: _Rates) -> list[NetworkLine]:
    """A line for each pair of a site's devices."""
    place = chart_map.place
    if chart_map.crowded:
        return []
    return [
        _link_line(place[a], place[b], [rates[way] for way in ((a, b), (b, a)) if way in rates], rates)
        for a, b in combinations(site, 2)
    ]


def _route_chart(chart_map: _Map, number: int, route: Route) -> NetworkChart:
    """A route's tree up to its root, and the one down from it, in a colour of their own."""
    look = f"route{number}"
    share = _share(route.share)
    name = chart_map.names[route.root]
    gaps = (1.25 * chart_map.radius, 1.25 * chart_map.radius + 2)
    lines = [NetworkLine(*a, *b, "grid", 1.0) for a, b in _background(chart_map)]
    for edges, dashed, what in ((route.up, False, "up"), (route.down, True, "down")):
        for source, target in edges:
            ends = _trimmed(chart_map.place[source], chart_map.place[target], *gaps)
            way = f"{what}: {chart_map.names[source]} → {chart_map.names[target]}, {share} of the bytes"
            lines.append(_shifted_arrow(*ends, look, dashed=dashed, tooltip=way))
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
    return NetworkChart(f"{share} at {name}", tuple(lines), nodes, texts, alt, WIDTH, chart_map.height)


def _rates(chart_map: _Map) -> _Rates:
    """By directed pair on the map, bytes a second."""
    return {
        (link.source, link.target): link.bandwidth_bytes_per_s
        for link in chart_map.problem.links
        if link.source in chart_map.place and link.target in chart_map.place
    }


def _background(chart_map: _Map) -> list[tuple[Point, Point]]:
    """The links that a route's panel shows pale; none where they would be more than can be seen."""
    if len(chart_map.place) > MAX_RATED_NODES:
        return []
    pairs = {(min(pair), max(pair)) for pair in _rates(chart_map)}
    return [(chart_map.place[a], chart_map.place[b]) for a, b in sorted(pairs)]


def _link_line(a: Point, b: Point, own: Sequence[float], rates: _Rates) -> NetworkLine:
    """As thick as the fastest of a line's ``own`` rates is, among all; thin where the problem has none."""
    thickest = 3.2 if len(rates) <= MAX_RATED_NODES**2 else 1.2
    width = 0.8 + thickest * math.sqrt(max(own) / max(rates.values())) if own else 0.8
    return NetworkLine(*a, *b, "link", width)


def _rate_texts(a: Point, b: Point, figures: Sequence[str]) -> list[NetworkText]:
    """One figure where both ways are alike, else each near the end that sends."""
    first, second = figures
    if first == second:
        return [_figure(_along(a, b, RATE_AT), first)]
    return [_figure(_along(a, b, RATE_AT), first), _figure(_along(b, a, RATE_AT), second)]


def _figure(at: Point, text: str) -> NetworkText:
    return NetworkText(*at, text, muted=True, backed=True)


def _names(chart_map: _Map, roots: Sequence[str]) -> list[NetworkText]:
    """A name beside each node, on the side away from the middle of its site."""
    texts = []
    for device, (x, y) in chart_map.place.items():
        if len(chart_map.place) > MAX_NAMED_NODES and device not in roots:
            continue
        dx, dy = chart_map.outward[device]
        anchor: Anchor = "middle" if abs(dx) < 0.4 else "start" if dx > 0 else "end"
        texts.append(NetworkText(x + 12 * dx, y + 15 * dy, chart_map.names[device], anchor, backed=True))
    return texts


def _node(chart_map: _Map, device: str, look: str = "", *, left_out: bool = False) -> NetworkNode:
    x, y = chart_map.place[device]
    usual = "left-out" if left_out else "helper" if device in chart_map.helpers else "holder"
    return NetworkNode(x, y, chart_map.radius * (4 / 3 if look else 1), look or usual, device)


def _shifted_arrow(a: Point, b: Point, look: str, *, dashed: bool, tooltip: str) -> NetworkLine:
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


def _centre(chart_map: _Map, site: Sequence[str]) -> Point:
    places = [chart_map.place[device] for device in site]
    return sum(x for x, _ in places) / len(places), sum(y for _, y in places) / len(places)


def _along(a: Point, b: Point, part: float) -> Point:
    return a[0] + part * (b[0] - a[0]), a[1] + part * (b[1] - a[1])


def _trimmed(a: Point, b: Point, before: float, after: float) -> tuple[Point, Point]:
    """The same way, shorter by so many pixels at each end."""
    length = math.dist(a, b) or 1.0
    return _along(a, b, before / length), _along(a, b, 1 - after / length)


def _share(part: float) -> str:
    return f"{100 * part:.3g}%"


def _rate(bytes_per_s: float) -> str:
    """Mbit/s in three figures at most."""
    mbit = bytes_per_s * 8e-6
    return f"{mbit:.0f}" if mbit >= 100 else f"{mbit:.3g}"


def _range(rates: Sequence[float]) -> str:
    if not rates:
        return "free"
    low, high = _rate(min(rates)), _rate(max(rates))
    return low if low == high else f"{low}–{high}"
