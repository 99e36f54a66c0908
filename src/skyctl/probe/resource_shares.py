"""Divides what several devices draw from one machine: free memory, or a cgroup's limit, and processors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from skyctl.probe.device_probes import DeviceProbe


@dataclass(frozen=True)
class SeenMemory:
    """The memory that one device found. ``pot``: equal where it is the same memory; None: the device's own.

    ``own_bytes``: what its probing process held itself, which others see as taken.
    """

    memory_bytes: float
    memory_from: str
    pot: str | None
    own_bytes: float
    cap_bytes: float | None


@dataclass(frozen=True)
class UsableMemory:
    """The memory that one device may use, and in words where that figure comes from."""

    memory_bytes: float
    memory_from: str


def divide_memory(devices: Mapping[str, SeenMemory]) -> dict[str, UsableMemory]:
    """Every device's share of memory: equal parts of its pot; what a capped device leaves goes to others."""
    pots: dict[str, list[str]] = {}
    for name, seen in devices.items():
        pots.setdefault(seen.pot if seen.pot is not None else f"own {name}", []).append(name)
    shares: dict[str, UsableMemory] = {}
    for members in pots.values():
        held = sum(devices[name].own_bytes for name in members)
        total = min(devices[name].memory_bytes + held - devices[name].own_bytes for name in members)
        for name, share in _water_fill(total, {name: devices[name].cap_bytes for name in members}).items():
            seen = devices[name]
            if seen.cap_bytes is not None and share >= seen.cap_bytes:
                words = "memory_gib"
            elif len(members) > 1:
                words = f"{seen.memory_from}, shared by {len(members)} devices"
            else:
                words = seen.memory_from
            shares[name] = UsableMemory(share, words)
    return {name: shares[name] for name in devices}


def _water_fill(total: float, caps: Mapping[str, float | None]) -> dict[str, float]:
    """Water-filling: equal parts; what a capped one leaves goes to the others."""
    shares: dict[str, float] = {}
    left = total
    limits = {name: float("inf") if cap is None else cap for name, cap in caps.items()}
    waiting = sorted(limits, key=lambda name: limits[name])
    for number, name in enumerate(waiting):
        shares[name] = min(left / (len(waiting) - number), limits[name])
        left -= shares[name]
    return shares


def assign_threads(members: Sequence[DeviceProbe]) -> dict[int, int]:
    """By ``id(member)``, the threads to set there. CPU devices on the same processors share them."""
    cpu_members = [member for member in members if member.on_cpu and "cpu_scope" in member.facts]
    threads: dict[int, int] = {}
    for member in cpu_members:
        sharing = [other for other in cpu_members if member.shares(other)]
        shares = divide_threads(
            [other.node.threads for other in sharing],
            [int(other.facts["threads"]) for other in sharing],
            float(member.facts["cpus"]),
        )
        threads |= {id(m): n for m, n in zip(sharing, shares, strict=True) if m is member}
    return threads


def crowding(members: Sequence[DeviceProbe], member: DeviceProbe) -> float:
    """How many devices there are for each of the processors that they share with this one; 1 at least."""
    if not member.on_cpu or "cpu_scope" not in member.facts:
        return 1.0
    sharing = sum(other.on_cpu and "cpu_scope" in other.facts and member.shares(other) for other in members)
    return max(1.0, sharing / float(member.facts["cpus"]))


def divide_threads(wanted: Sequence[int | None], default: Sequence[int], cpus: float) -> list[int]:
    """The threads of CPU devices on the same processors: equal parts, at least one each.

    Args:
        wanted: what cluster.yaml says for each; it is kept.
        default: what torch would take for each; nobody gets more.
        cpus: how many there are, a fraction under a quota.
    """
    open_places = sum(1 for threads in wanted if threads is None)
    left = max(0, int(cpus) - sum(threads or 0 for threads in wanted))
    part = left // open_places if open_places else 0
    return [
        threads if threads is not None else max(1, min(usual, part))
        for threads, usual in zip(wanted, default, strict=True)
    ]
