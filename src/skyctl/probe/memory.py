"""Divides what several nodes draw from one pot: free memory of a machine, or one cgroup's limit. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Seen:
    """What one device saw. ``pot``: equal where it is the same memory; None where it is the device's own.

    ``own_bytes``: what its probing process held itself, which others see as taken.
    """

    memory_bytes: float
    memory_from: str
    pot: str | None
    own_bytes: float
    cap_bytes: float | None


@dataclass(frozen=True)
class Usable:
    """What one device may use, and in words where that figure comes from."""

    memory_bytes: float
    memory_from: str


def usable(devices: Mapping[str, Seen]) -> dict[str, Usable]:
    """Every device's share: equal parts of its pot, but no more than its cap, which leaves others more."""
    pots: dict[str, list[str]] = {}
    for name, seen in devices.items():
        pots.setdefault(seen.pot if seen.pot is not None else f"own {name}", []).append(name)
    found: dict[str, Usable] = {}
    for members in pots.values():
        held = sum(devices[name].own_bytes for name in members)
        total = min(devices[name].memory_bytes + held - devices[name].own_bytes for name in members)
        for name, share in _divide(total, {name: devices[name].cap_bytes for name in members}).items():
            seen = devices[name]
            if seen.cap_bytes is not None and share >= seen.cap_bytes:
                words = "memory_gib"
            elif len(members) > 1:
                words = f"{seen.memory_from}, shared by {len(members)} devices"
            else:
                words = seen.memory_from
            found[name] = Usable(share, words)
    return {name: found[name] for name in devices}


def _divide(total: float, caps: Mapping[str, float | None]) -> dict[str, float]:
    """Water-filling: equal parts; what a capped one leaves goes to the others."""
    shares: dict[str, float] = {}
    left = total
    limits = {name: float("inf") if cap is None else cap for name, cap in caps.items()}
    waiting = sorted(limits, key=lambda name: limits[name])
    for number, name in enumerate(waiting):
        shares[name] = min(left / (len(waiting) - number), limits[name])
        left -= shares[name]
    return shares
