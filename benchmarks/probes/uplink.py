"""Uplinks: is what a site's nodes share found, named after the right site, and only where there is any?"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from probes.fleets import lab_text, ready
from skyctl.probe.contention import measure_uplinks
from skyctl.probe.link_measurement import LinkSelection, measure_links
from skyctl.probe.site_clustering import name_sites

LABS: dict[str, dict[str, Any]] = {
    "two sites, uplink of 20": {"sites": "ab", "uplink_mbit": {"b": 20}},
    "two sites, no uplink": {"sites": "ab", "uplink_mbit": {}},
    "three sites, uplink of 20": {"sites": "abc", "uplink_mbit": {"b": 20}},
    "two sites, uplink of 20, no latency": {"sites": "ab", "uplink_mbit": {"b": 20}, "latency_ms": 0},
}


def section(hows: tuple[LinkSelection, ...] = ("all", "sites")) -> Iterator[dict[str, Any]]:
    """Each lab with two nodes of 100 Mbit/s a site, 5 ms apart where nothing else is said."""
    for name, case in LABS.items():
        yield from found(name, case, hows)


def found(
    name: str, case: Mapping[str, Any], hows: tuple[LinkSelection, ...], nodes: int = 2
) -> Iterator[dict[str, Any]]:
    """One lab."""
    machines = [
        {"name": f"{site}{number}", "cpus": 0.25, "rate_mbit": 100, "site": site}
        for site in case["sites"]
        for number in range(nodes)
    ]
    text = lab_text(machines, latency_ms=case.get("latency_ms", 5), uplink_mbit=case["uplink_mbit"])
    with ready(text) as up:
        for how in hows:
            begun = time.perf_counter()
            links, sites = measure_links(up.probes, up.addresses, how=how)
            between = time.perf_counter()
            told = name_sites(sites, {})
            uplinks, reasons = measure_uplinks(up.probes, up.addresses, links, told)
            ended = time.perf_counter()
            place = {node: site.name for site in told for node in site.nodes}
            across = [k for k in links if place[k.source] != place[k.target]]
            rates = [(k.bandwidth_bytes_per_s or 0.0) / 125_000 for k in across]
            yield {
                "case": name,
                "how": how,
                "sites": sites,
                "across_mbit": [round(min(rates), 1), round(max(rates), 1)] if rates else [],
                "estimated": sum(k.estimated for k in links),
                "uplinks": {
                    f"{u.site} {u.direction}": round(u.bandwidth_bytes_per_s / 125_000, 2) for u in uplinks
                },
                "reasons": reasons,
                "links_s": round(between - begun, 1),
                "uplinks_s": round(ended - between, 1),
            }
