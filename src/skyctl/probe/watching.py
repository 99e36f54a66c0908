"""From what the probe's processes told: threads for each device, and the conditions it was measured under."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from skyctl.probe.fleet import Member
from skyctl.probe.otherload import Used, Watched, across_numa, judge, share_threads
from skyctl.records.cluster import device_id
from skyctl.records.profile import Conditions


class OwnUse:
    """What the launcher itself uses of its machine, from its making on."""

    def __init__(self) -> None:
        self._start = time.monotonic(), time.process_time()

    def by_machine(self) -> dict[str, Used]:
        """By boot id; empty where the machine can't be told."""
        wall_s, cpu_s = time.monotonic() - self._start[0], time.process_time() - self._start[1]
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        except OSError:
            return {}
        allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
        return {boot: Used(cpu_s / wall_s, frozenset(allowed))} if wall_s > 0 else {}


def threads(members: Sequence[Member]) -> dict[int, int]:
    """By ``id`` of the member: what to set. CPU devices on the same processors share them."""
    told = [member for member in members if _on_cpu(member) and "cpu_scope" in member.facts]
    found: dict[int, int] = {}
    for member in told:
        sharing = [other for other in told if member.shares(other)]
        shares = share_threads(
            [other.node.threads for other in sharing],
            [int(other.facts["threads"]) for other in sharing],
            float(member.facts["cpus"]),
        )
        found |= {id(m): n for m, n in zip(sharing, shares, strict=True) if m is member}
    return found


def conditions(members: Sequence[Member], launcher: OwnUse) -> dict[str, Conditions]:
    """By device id. A member whose process told nothing has none."""
    sharing = threads(members)
    found = judge(
        {_name(m): _watched(m) for m in members if m.measured.get("watched")}, launcher.by_machine()
    )
    for member in members:
        known = found.get(_name(member))
        if known is not None:
            more = [note for note in (_numa(member), _shared(member, members, sharing)) if note]
            found[_name(member)] = known.model_copy(update={"notes": (*known.notes, *more)})
    return found


def _watched(member: Member) -> Watched:
    facts = member.facts
    machine = str(facts.get("boot_id", ""))
    return Watched(
        node=member.node.name,
        scope=str(facts.get("cpu_scope", machine)),
        machine=machine,
        cpus=float(facts["cpus"]),
        bound=bool(facts.get("bound")),
        threads=int(member.measured["threads"]),
        on_cpu=_on_cpu(member),
        slowdown=member.node.slowdown,
        counts=member.measured["watched"],
        allowed=member.affinity,
    )


def _numa(member: Member) -> str | None:
    if not _on_cpu(member):
        return None
    return across_numa(int(member.measured["threads"]), member.facts.get("numa_nodes"))


def _shared(member: Member, members: Sequence[Member], sharing: dict[int, int]) -> str | None:
    """Where a device gets fewer threads than it would alone."""
    count = sharing.get(id(member))
    if count is None or member.node.threads is not None or count >= int(member.facts["threads"]):
        return None
    others = sorted({m.node.name for m in members if m is not member and _on_cpu(m) and member.shares(m)})
    words = f"{count} thread{'' if count == 1 else 's'} instead of {member.facts['threads']}"
    if not others:
        return f"it has {words}: its quota allows no more"
    named = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
    return (
        f"it has {words}, because it shares its processors with {named} (`threads` in cluster.yaml sets it)"
    )


def _on_cpu(member: Member) -> bool:
    return member.local.startswith("cpu")


def _name(member: Member) -> str:
    return device_id(member.node.name, member.local)
