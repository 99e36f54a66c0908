"""Labs in which sums are measured: what joins their nodes, as lab.yaml."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

MESH_MBIT = {("a", "b"): 40, ("b", "c"): 40, ("c", "d"): 40, ("a", "d"): 5, ("a", "c"): 20, ("b", "d"): 20}
"""Packed trees carry 55 Mbit/s of gradients, the best ring one way 13.3 and both ways 26.7."""
LAN_MBIT, WAN_MBIT = 80, 10
SITES = ("a1", "a2", "a3"), ("b1", "b2", "b3")


@dataclass(frozen=True)
class SumLab:
    """One set of links.

    Attributes:
        text: the lab.yaml; a ring goes around in the order of its nodes.
        cut: pairs of nodes that can't reach each other.
        processors: whether processors bind there, and not links.
        optimum_mbit: of gradients, on the links as they are set; None: not known in a closed form.
    """

    text: str
    cut: tuple[tuple[str, str], ...] = ()
    processors: bool = False
    optimum_mbit: float | None = None


def _nodes(nodes: Mapping[str, str], cpus: float) -> list[str]:
    return [
        "nodes:",
        *(f"  - {{name: {name}, cpus: {cpus}, memory_gib: 2{more}}}" for name, more in nodes.items()),
    ]


def _links(rates: Mapping[tuple[str, str], float], latency_ms: float = 0.0) -> list[str]:
    latency = f", latency_ms: {latency_ms}" if latency_ms else ""
    return [
        "links:",
        *(f"  - {{between: [{a}, {b}], rate_mbit: {rate}{latency}}}" for (a, b), rate in rates.items()),
    ]


def _text(*parts: Iterable[str]) -> str:
    return "".join(f"{line}\n" for part in parts for line in part)


def _lines(rates: Sequence[float], cpus: float = 0.5, sites: str = "") -> str:
    """Nodes with a line each; every second half is site b where there are sites."""
    half = len(rates) // 2
    nodes = {
        f"n{i + 1}": f", rate_mbit: {rate}" + (f", site: {'ab'[i >= half]}" if sites else "")
        for i, rate in enumerate(rates)
    }
    return _text(_nodes(nodes, cpus), [f"sites: {sites}"] if sites else [])


def _two_sites() -> SumLab:
    near = {pair: LAN_MBIT for site in SITES for pair in combinations(site, 2)}
    far = dict.fromkeys(zip(*SITES, strict=True), WAN_MBIT)
    cut = tuple((a, b) for a in SITES[0] for b in SITES[1] if (a, b) not in far)
    nodes = dict.fromkeys([*SITES[0], *SITES[1]], "")
    return SumLab(_text(_nodes(nodes, 0.33), _links({**near, **far})), cut, optimum_mbit=30.0)


_MESH_ORDER = dict.fromkeys(("a", "b", "d", "c"), "")  # in which the best ring goes around

LABS = {
    "mesh": SumLab(_text(_nodes(_MESH_ORDER, 0.5), _links(MESH_MBIT)), optimum_mbit=55.0),
    "two sites": _two_sites(),
    "equal lines": SumLab(_lines([50, 50, 50, 50]), optimum_mbit=50 * 4 / 6),
    "unequal lines": SumLab(_lines([100, 50, 50, 20])),
    "fat line": SumLab(_lines([200, 40, 40, 40])),
    "uplink": SumLab(_lines([200, 200, 100, 100], sites="{latency_ms: 5, uplink_mbit: {b: 50}}")),
    "far mesh": SumLab(_text(_nodes(_MESH_ORDER, 0.5), _links(MESH_MBIT, latency_ms=10))),
    "slow processors": SumLab(_lines([1000, 1000, 1000, 1000], cpus=0.2), processors=True),
}

HELPER = SumLab(
    _text(_nodes({**{f"n{i}": ", rate_mbit: 50" for i in range(1, 5)}, "h": ", rate_mbit: 250"}, 0.4)),
    optimum_mbit=50.0,
)
"""Four equal lines, and a node with a fat one that holds nothing; without it a ring of 33.3 is best."""
