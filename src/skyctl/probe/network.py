"""What lies between the nodes: their addresses, links, sites, own lines and the sites' uplinks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

from skyctl.errors import SkyctlError
from skyctl.probe.fleet import Fleet
from skyctl.probe.lines import measure_lines
from skyctl.probe.links import How, default_how, measure_links
from skyctl.probe.sites import named
from skyctl.probe.uplinks import measure_uplinks
from skyctl.records.cluster import Cluster
from skyctl.records.profile import LineProfile, LinkProfile, SiteProfile, UplinkProfile
from skyctl.remote.addresses import peer_address_outcomes

Progress = Callable[[str, str, float], None]
"""Called with ``links``, ``lines`` or ``uplinks``, what is being done, what part is done."""


@dataclass(frozen=True)
class Network:
    """As in a profile."""

    links: Sequence[LinkProfile]
    sites: Sequence[SiteProfile] = ()
    lines: Sequence[LineProfile] = ()
    uplinks: Sequence[UplinkProfile] = ()


def measure_network(
    fleet: Fleet, cluster: Cluster, addresses: Mapping[str, str], how: How | None, on_progress: Progress
) -> Network:
    """Of the nodes that are left. ``how``: which links are measured (None: ``default_how``)."""
    links, sites = _links(fleet, addresses, cluster, how, on_progress)
    lines, uplinks = _lines(fleet, addresses, links, sites, on_progress)
    return Network(links, sites, lines, uplinks)


def addresses_of(fleet: Fleet, sessions: Mapping[str, Any]) -> dict[str, str]:
    """By node, the address its peers use."""
    alive = {m.node.name: sessions[m.node.name] for m in fleet.alive()}
    addresses: dict[str, str] = {}
    for name, outcome in peer_address_outcomes(alive).items():
        if isinstance(outcome, SkyctlError):
            fleet.fail(name, outcome)
        else:
            addresses[name] = outcome
    return addresses


def _links(
    fleet: Fleet, addresses: Mapping[str, str], cluster: Cluster, how: How | None, on_progress: Progress
) -> tuple[list[LinkProfile], list[SiteProfile]]:
    """The links between the nodes that are left, and their sites."""
    how = how or default_how(len(addresses))
    links, found = measure_links(fleet, addresses, rounds_of("links", on_progress), how)
    on_progress("links", "not measured" if how == "none" else "measured", 1.0)
    gone = set(fleet.failures)
    left = ([name for name in site if name not in gone] for site in found)
    sites = named([site for site in left if site], cluster.groups)
    return [link for link in links if not {link.source, link.target} & gone], sites


def _lines(
    fleet: Fleet,
    addresses: Mapping[str, str],
    links: Sequence[LinkProfile],
    sites: Sequence[SiteProfile],
    on_progress: Progress,
) -> tuple[list[LineProfile], list[UplinkProfile]]:
    """The nodes' own lines, and the sites'. What is on one machine, by loopback, has no line in between."""
    apart = {name: address for name, address in addresses.items() if not ip_address(address).is_loopback}
    lines, reasons = measure_lines(fleet, apart, links, rounds_of("lines", on_progress))
    uplinks, others = measure_uplinks(fleet, apart, links, sites, rounds_of("uplinks", on_progress))
    for name, reason in (*reasons.items(), *others.items()):
        on_progress("lines", f"{name} left out: {reason}", 0.0)
    return lines, uplinks


def rounds_of(what: str, on_progress: Progress) -> Callable[[int, int], None]:
    """What to call with rounds done and rounds in all."""
    return lambda done, of: on_progress(what, f"round {done + 1} of {of}", done / max(1, of))
