"""Links: are bandwidth and latency what the lab was set to, and how long do they take?"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from probes.fleets import Ready, lab_text, ready
from skyctl.probe.contention import measure_node_lines
from skyctl.probe.link_measurement import measure_links
from skyctl.records.profile import LinkProfile

RATES = {"r5": 5.0, "r20": 20.0, "r50": 50.0, "r100": 100.0, "r200": 200.0}
LATENCIES_MS = (0, 1, 5, 20, 50)
HUB = "hub"


def accuracy(
    latencies_ms: Sequence[float] = LATENCIES_MS, cpus: float = 0.3, runs: int = 2
) -> Iterator[dict[str, Any]]:
    """One lab a latency: a hub in a site of its own, and nodes of five rates in another."""
    for latency_ms in latencies_ms:
        nodes: list[dict[str, Any]] = [{"name": HUB, "cpus": 1.0, "site": "a"}]
        nodes += [
            {"name": name, "cpus": cpus, "rate_mbit": rate, "site": "b"} for name, rate in RATES.items()
        ]
        with ready(lab_text(nodes, latency_ms=latency_ms)) as up:
            for number in range(runs):
                begun = time.perf_counter()
                links, _ = measure_links(up.probes, up.addresses)
                took_s = time.perf_counter() - begun
                case = {"case": "links", "cpus": cpus, "latency_ms": latency_ms, "run": number}
                yield case | judged(links, latency_ms) | {"took_s": round(took_s, 1)}


def judged(links: Sequence[LinkProfile], latency_ms: float) -> dict[str, Any]:
    """How far the links are from what was set; ``off``: those outside 8%, and 10% + 0.3 ms."""
    rates, late, off = [], [], []
    for link in links:
        if link.source == link.target or link.latency_s is None or link.bandwidth_bytes_per_s is None:
            off.append(f"{link.source}->{link.target} {link.error}")
            continue
        set_mbit = min(RATES.get(link.source, 1e9), RATES.get(link.target, 1e9))
        set_ms = latency_ms if HUB in (link.source, link.target) else 0.0
        rate = link.bandwidth_bytes_per_s / 125_000 / set_mbit - 1
        ms = link.latency_s * 1e3 - set_ms
        rates.append(rate)
        late.append(ms)
        if abs(rate) > 0.08 or abs(ms) > 0.1 * set_ms + 0.3:
            off.append(f"{link.source}->{link.target} {rate:+.1%} {ms:+.2f} ms")
    return {
        "links": len(rates),
        "rate_error": [round(min(rates), 3), round(max(rates), 3)],
        "latency_error_ms": [round(min(late), 2), round(max(late), 2)],
        "off": off,
    }


def duration(counts: Sequence[int] = (4, 16)) -> Iterator[dict[str, Any]]:
    """How long links and lines take for so many nodes of 100 Mbit/s on one network."""
    for count in counts:
        nodes = [{"name": f"n{i}", "cpus": 0.2, "rate_mbit": 100} for i in range(count)]
        with ready(lab_text(nodes)) as up:
            yield {"case": "link time", "nodes": count} | timed(up)


def timed(up: Ready) -> dict[str, Any]:
    """Seconds for the pairs and for the lines."""
    begun = time.perf_counter()
    links, _ = measure_links(up.probes, up.addresses)
    between = time.perf_counter()
    measure_node_lines(up.probes, up.addresses, links)
    ended = time.perf_counter()
    return {"links_s": round(between - begun, 1), "lines_s": round(ended - between, 1)}


def section() -> Iterator[dict[str, Any]]:
    """All of it."""
    yield from accuracy()
    yield from accuracy((5,), cpus=0.12)
    yield from duration()
