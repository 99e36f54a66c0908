"""Figures in earlier profiles of a cluster that need not be measured again.

The profiles that are kept are the cache: a device's layer timings hold while its fingerprint is the same, and
links while both their ends are what and where they were. Memory, load and versions are always read anew.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from skyctl import __version__
from skyctl.probe.device_probes import DeviceProbe
from skyctl.probe.node.probe_requests import DistinctLayer
from skyctl.records.cluster import is_cpu
from skyctl.records.profile import DeviceProfile, LayerTiming, LinkProfile, Profile, ShapeProfile, unconverged

TIMINGS_MAX_AGE_S = 30 * 86400.0
LINKS_MAX_AGE_S = 86400.0
"""How old timings and links may be."""
LEAST_SHARE = 0.9
"""Timings of a device that had less of itself than this are measured again."""
MOST_INTERVAL = 0.06
"""So are those whose interval is wider: twice what a probe measures until."""

MEASURED_WITH_MESSAGES = (
    *("handling_s", "handling_byte_s", "step_s", "message_byte_s", "reduce_byte_s", "gloo"),
)
"""The figures of a device that are measured after its layers, all together or not at all."""

TimingKey = tuple[str, int]
"""A layer's signature and a microbatch size."""


def fingerprint(facts: Mapping[str, Any], device: str, slowdown: float, sharing: int) -> str:
    """The properties that must be the same for a device's timings to hold, as one readable line.

    Args:
        facts: the node's (``device/node_environment.py``).
        device: its local name, as in ``cuda:1``.
        sharing: how many devices draw on the same processors.
    """
    names = {listed["id"]: listed["name"] for listed in facts["devices"]}
    parts = [
        str(names.get(device, device)),
        str(facts["cpu_model"]),
        f"{float(facts['cpus']):.4g} cpus for {sharing}",
        f"{facts.get('threads')} threads",
        f"slowdown {slowdown:g}",
        f"torch {facts['torch']}",
        f"skyctl {__version__}",
    ]
    if facts.get("max_cpu_isa") is not None:
        parts.append(f"instructions up to {facts['max_cpu_isa']}")
    return " | ".join(parts)


def fingerprints(members: Sequence[DeviceProbe]) -> dict[str, str]:
    """The fingerprint of each device, by device id."""
    return {
        m.id: fingerprint(m.facts, m.local, m.node.slowdown, sum(m.shares(other) for other in members))
        for m in members
    }


@dataclass
class CachedTimings:
    """By device id: fingerprints, and of what was measured earlier the rows that hold.

    ``lacking``: what its machine measures now; all devices of a machine do, because they load each other.
    ``sources``: the newest profile of the device that rows come from, ``dates``: of the oldest of them.
    ``handling``: whether the message overhead is measured, where not all is known; ``gloo``: over Gloo, too,
    between CPUs.
    ``actions``: devices' call overhead (``DeviceProfile.action_s``), where too little
    is measured to tell, or was taken off rows that hold.
    ``speeds``: when a profile is only re-checked, its devices' FLOP/s; too little is measured then to tell.
    """

    prints: Mapping[str, str] = field(default_factory=dict)
    rows: Mapping[str, Mapping[TimingKey, LayerTiming]] = field(default_factory=dict)
    sources: Mapping[str, DeviceProfile] = field(default_factory=dict)
    dates: Mapping[str, str] = field(default_factory=dict)
    lacking: Mapping[str, Collection[TimingKey]] = field(default_factory=dict)
    handling: bool = True
    gloo: bool = False
    speeds: Mapping[str, float] | None = None
    actions: Mapping[str, float] = field(default_factory=dict)

    def generic(self, name: str) -> bool:
        """Whether that device measures only its speed: the profile that is rechecked does not have it."""
        return self.speeds is not None and name not in self.speeds

    def handles(self, name: str) -> bool:
        """Whether that device measures what messages, and adding up gradients, cost it."""
        if not self.handling or not self.rows.get(name) or self.lacking.get(name):
            return self.handling
        return self.sources[name].gloo is None and self.handles_gloo(name)

    def handles_gloo(self, name: str) -> bool:
        """Whether that device measures what messages cost it over Gloo."""
        return self.gloo and is_cpu(name)

    def to_measure(self, name: str, layers: Sequence[DistinctLayer]) -> tuple[DistinctLayer, ...]:
        """The layers as that device is asked to measure them: with the sizes at which each is known."""
        lacking = self.lacking.get(name)
        if lacking is None:
            return tuple(layers)
        return tuple(
            replace(
                layer,
                known_sizes=tuple(s for s, sign in layer.signatures.items() if (sign, s) not in lacking),
            )
            for layer in layers
        )

    def complete(self, members: Sequence[DeviceProbe]) -> None:
        """Puts what is known to what each process has measured; what only kept others company goes."""
        for member in members:
            name = member.id
            rows, lacking = self.rows.get(name, {}), self.lacking.get(name)
            if lacking is None:
                continue
            old = [row.model_dump() for key, row in rows.items() if key not in lacking]
            measured = member.measured["timings"]
            new = [row for row in measured if (row["signature"], row["microbatch_size"]) in lacking]
            member.measured = {**member.measured, "timings": [*old, *new]}
            if old and not lacking:  # it has only waited: what layers leave behind is known too
                source = self.sources[name]
                member.measured |= {
                    "reserved_bytes": max(source.reserved_bytes, member.measured["reserved_bytes"]),
                    "action_s": source.action_s,
                }
                if not self.handles(name):
                    member.measured |= {figure: getattr(source, figure) for figure in MEASURED_WITH_MESSAGES}

    def dated(self, device: DeviceProfile, now: str) -> DeviceProfile:
        """The device's profile with its fingerprint, and since when its timings are known."""
        lacking, rows = self.lacking.get(device.id), self.rows.get(device.id, {})
        taken = lacking is not None and bool(set(rows) - set(lacking))
        update: dict[str, Any] = {
            "fingerprint": self.prints.get(device.id),
            "measured": self.dates[device.id] if taken else now,
        }
        if taken and not lacking:
            update["conditions"] = self.sources[device.id].conditions
        return device.model_copy(update=update)


def cached_timings(
    members: Sequence[DeviceProbe],
    earlier: Sequence[Profile],
    shapes: Sequence[ShapeProfile],
    dtype: str,
    now: str,
    *,
    gloo: bool = False,
) -> CachedTimings:
    """The timings that still hold of the layers that are wanted, from profiles given newest first.

    Args:
        gloo: what messages cost over Gloo is wanted, too.
    """
    wanted = list(dict.fromkeys((layer.signature, s.microbatch_size) for s in shapes for layer in s.layers))
    prints = fingerprints(members)
    rows: dict[str, dict[TimingKey, LayerTiming]] = {name: {} for name in prints}
    sources: dict[str, DeviceProfile] = {}
    dates: dict[str, str] = {}
    for profile in earlier:
        if profile.workload is None or profile.workload.dtype != dtype:
            continue
        for device in profile.devices:
            date = device.measured or profile.created
            if prints.get(device.id) != device.fingerprint or not _is_trusted(device, date, now):
                continue
            if device.action_s != sources.get(device.id, device).action_s:
                continue  # something else was taken off its layers
            cached = rows[device.id]
            rough = {id(timing) for timing in unconverged(device.timings, MOST_INTERVAL)}
            for timing in device.timings:
                key = timing.signature, timing.microbatch_size
                is_usable = timing.forward_s is not None and id(timing) not in rough
                if key in wanted and key not in cached and is_usable:
                    cached[key] = timing
                    sources.setdefault(device.id, device)
                    dates[device.id] = min(date, dates.get(device.id, date))
    machines: dict[str, set[TimingKey]] = {}
    for member in members:
        missing = set(wanted) - set(rows[member.id])
        machines.setdefault(_machine_id(member), set()).update(missing)
    lacking = {m.id: machines[_machine_id(m)] for m in members}
    actions = {name: source.action_s for name, source in sources.items() if set(rows[name]) - lacking[name]}
    return CachedTimings(prints, rows, sources, dates, lacking, gloo=gloo, actions=actions)


def _machine_id(member: DeviceProbe) -> str:
    return str(member.facts.get("boot_id") or member.node.name)


def _is_trusted(device: DeviceProfile, date: str, now: str) -> bool:
    if device.fingerprint is None or age_s(date, now) > TIMINGS_MAX_AGE_S:
        return False
    share = device.conditions.share if device.conditions is not None else None
    return share is None or share >= LEAST_SHARE


def costliest_layers(then: Profile, microbatch_size: int, members: Sequence[DeviceProbe]) -> CachedTimings:
    """When a profile is only re-checked: each device measures its costliest layer and no other.

    A device that the profile does not have measures none.
    """
    prints = fingerprints(members)
    lacking: dict[str, list[TimingKey]] = {name: [] for name in prints}
    for device in then.devices:
        timings = [t for t in device.timings if t.microbatch_size == microbatch_size]
        timings = [t for t in timings if t.forward_s is not None]
        if device.id in lacking and timings:
            worst = max(timings, key=lambda t: (t.forward_s or 0.0) + (t.backward_s or 0.0))
            lacking[device.id] = [(worst.signature, microbatch_size)]
    speeds = {device.id: device.flops_per_s for device in then.devices}
    actions = {device.id: device.action_s for device in then.devices}
    return CachedTimings(prints, lacking=lacking, handling=False, speeds=speeds, actions=actions)


def cached_links(
    earlier: Sequence[Profile], cached: CachedTimings, addresses: Mapping[str, str], now: str
) -> Profile | None:
    """The newest profile whose links hold for every pair of these nodes, with those of other nodes left out.

    All or none: sites and shared lines follow from all links together.
    """
    prints: dict[str, set[str]] = {name: set() for name in addresses}
    for device, text in cached.prints.items():
        prints.setdefault(device.rpartition("/")[0], set()).add(text)
    if len(addresses) < 2:
        return None
    for profile in earlier:
        links = {(link.source, link.target): link for link in profile.links}
        needed = [(a, b) for a in addresses for b in addresses if a != b]
        fresh = all(_is_fresh(links.get(pair), profile, now) for pair in needed)
        if fresh and all(_is_unchanged(profile, name, addresses[name], prints[name]) for name in addresses):
            return _restricted_to(profile, set(addresses))
    return None


def _is_fresh(link: LinkProfile | None, profile: Profile, now: str) -> bool:
    if link is None or link.error is not None or link.latency_s is None:
        return False
    return age_s(link.measured or profile.created, now) <= LINKS_MAX_AGE_S


def _is_unchanged(profile: Profile, node: str, address: str, prints: set[str]) -> bool:
    addresses = [node_profile.address for node_profile in profile.nodes if node_profile.name == node]
    return addresses == [address] and prints == {d.fingerprint for d in profile.devices if d.node == node}


def _restricted_to(profile: Profile, nodes: set[str]) -> Profile:
    """Its links, lines, sites and uplinks as far as these nodes go; every link with its date."""
    sites = [
        site.model_copy(update={"nodes": tuple(name for name in site.nodes if name in nodes)})
        for site in profile.sites
        if nodes & set(site.nodes)
    ]
    names = {site.name for site in sites}
    return profile.model_copy(
        update={
            "links": tuple(
                link.model_copy(update={"measured": link.measured or profile.created})
                for link in profile.links
                if {link.source, link.target} <= nodes
            ),
            "lines": tuple(line for line in profile.lines if line.node in nodes),
            "sites": tuple(sites),
            "uplinks": tuple(uplink for uplink in profile.uplinks if uplink.site in names),
        }
    )


def age_s(date: str, now: str) -> float:
    """Seconds between two ISO dates; infinite where one can't be read or the first is later."""
    try:
        seconds = (datetime.fromisoformat(now) - datetime.fromisoformat(date)).total_seconds()
    except (ValueError, TypeError):
        return math.inf
    return seconds if seconds >= 0 else math.inf


def reused_figures(profile: Profile) -> list[str]:
    """In words, what of a profile was measured before it was made."""
    words = []
    old = [
        d for d in profile.devices if d.measured is not None and d.measured != profile.created and d.timings
    ]
    if old:
        age = age_text(min(d.measured or "" for d in old), profile.created)
        names = "all devices" if len(old) == len(profile.devices) else ", ".join(d.id for d in old)
        words.append(f"layer times of {names} are of {age} ago")
    dates = [link.measured for link in profile.links if link.measured not in (None, profile.created)]
    if dates:
        words.append(f"links are of {age_text(min(d for d in dates if d is not None), profile.created)} ago")
    return words


def age_text(date: str, now: str) -> str:
    """How long ago, roughly: ``40 s``, ``5 min``, ``2 h``, ``3 days``."""
    seconds = age_s(date, now)
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if math.isfinite(seconds) and seconds >= size * (2 if unit == "days" else 1):
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s" if math.isfinite(seconds) else "unknown age"
