"""Who else used a device's processors while it was measured, and what that means for its times. Pure.

Every device counts what its own process used, what all used under its quota, and what all used on the
machine's processors. The probe's own processes on one machine are no strangers to each other: training will
run them side by side as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyctl.records.base import GIB
from skyctl.records.profile import Conditions

OTHERS = 0.08
"""Others are worth a word from this part of the processors on: the probe's helpers, SSH and the kernel stay
below (docs/probing.md)."""

OTHERS_CPUS = 0.03
"""And from so many processors on: on a tenth of one, an agent's heartbeat is a percent or two."""

SHORT = 0.12
"""What it got less than its due is worth a word from this part on."""

STOOD_STILL_S = 0.3
STOLEN = 0.05
CARD_BUSY = 0.05
CARD_HELD_BYTES = 512 << 20


@dataclass(frozen=True)
class Watched:
    """What one device's process counted; see ``probe/node/watch.Watch.read``.

    ``scope``: equal for devices that draw on the same processors; ``machine``: for those of one machine.
    ``cpus``: how many the scope has; ``bound``: by a quota. ``slowdown``: emulated, part of the time asleep.
    ``allowed``: the processors that it may use, which ``machine_s`` is counted on; empty: not told.
    """

    node: str
    scope: str
    machine: str
    cpus: float
    bound: bool
    threads: int
    on_cpu: bool
    slowdown: float
    counts: Mapping[str, Any]
    allowed: frozenset[int] = frozenset()

    def rate(self, name: str) -> float | None:
        """CPU seconds of that count per second."""
        value, wall_s = self.counts.get(name), float(self.counts["wall_s"])
        return None if value is None or wall_s <= 0 else float(value) / wall_s


@dataclass(frozen=True)
class Used:
    """What a process used: so many processors' time, spread over those that it may use (empty: not told)."""

    cpus: float
    allowed: frozenset[int] = frozenset()

    def of(self, mine: frozenset[int]) -> float:
        """What falls on these processors."""
        if not mine or not self.allowed:
            return self.cpus
        return self.cpus * len(mine & self.allowed) / len(self.allowed)


def judge(
    devices: Mapping[str, Watched], launcher: Mapping[str, Used] | None = None
) -> dict[str, Conditions]:
    """Conditions by device id.

    Args:
        launcher: by machine, what the launcher itself used there.
    """
    found = {}
    for name, seen in devices.items():
        if not seen.on_cpu:
            found[name] = _of_card(seen)
            continue
        own = sum(
            other.rate("own_s") or 0.0
            for other in devices.values()
            if other.scope == seen.scope and other.machine == seen.machine
        )
        used = [
            Used(other.rate("own_s") or 0.0, other.allowed)
            for other in devices.values()
            if other.machine == seen.machine
        ]
        used += [one for machine, one in (launcher or {}).items() if machine == seen.machine]
        ours = sum(one.of(seen.allowed) for one in used)
        found[name] = _of_processor(seen, own, ours, _demand(devices, seen))
    return found


def _demand(devices: Mapping[str, Watched], seen: Watched) -> float:
    """How many processors the devices of its scope can use together."""
    wants = [d.threads / d.slowdown for d in devices.values() if d.on_cpu and d.scope == seen.scope]
    return min(seen.cpus, float(sum(wants)))


def _of_processor(seen: Watched, own: float, ours: float, demand: float) -> Conditions:
    """``own``: used by the probe under the same quota (if there is one); ``ours``: on its processors."""
    machine = seen.rate("machine_s")
    outside = None if machine is None else max(0.0, machine - ours)
    used = seen.rate("scope_s") if seen.bound else machine
    mine = own if seen.bound else ours
    others = None if used is None else max(0.0, used - mine)
    notes: list[str] = []
    share: float | None = None
    if others is not None:
        left = min(demand, max(0.0, seen.cpus - others))
        share = min(1.0, left / demand) if demand > 0 else 1.0
        if others >= max(OTHERS_CPUS, OTHERS * seen.cpus):
            notes.append(
                f"other processes used {others:.2f} of this node's {_count(seen.cpus)} "
                "while it was measured: its times hold only under the same load"
            )
        short = 0.0 if seen.slowdown > 1.0 or left <= 0 else 1.0 - _got(seen, own) / left
        if seen.bound and short > SHORT:
            share *= 1.0 - short
            notes.append(_short_words(own, left, None if outside is None else outside - others))
    stood_s = float(seen.counts.get("left_out_s") or 0.0)
    if stood_s >= STOOD_STILL_S:
        notes.append(
            f"it waited {stood_s:.1f} s for something else than a processor (a disk?): left out of its times"
        )
    stolen = seen.rate("steal_s")
    if stolen is not None and stolen >= STOLEN * float(seen.counts.get("machine_cpus") or 1):
        notes.append(
            f"the machine under it took {stolen:.2f} processors away (steal time): another guest is busy"
        )
    if seen.counts.get("overheated"):
        notes.append("its processor was slowed down for its heat while it was measured")
    mine_rate = seen.rate("own_s")
    return Conditions(
        wall_s=float(seen.counts["wall_s"]),
        own_cpus=mine_rate,
        others_cpus=others,
        share=share,
        notes=tuple(notes),
    )


def _got(seen: Watched, own: float) -> float:
    """Processors that the probe got, and those it did not ask for while it stood still."""
    ran, waited = seen.rate("ran_s"), seen.rate("waited_s")
    if ran is None or waited is None or seen.threads > 1:
        return own
    asleep = max(0.0, 1.0 - ran - waited)
    return own + asleep * min(1.0, seen.cpus)


def _short_words(own: float, due: float, outside: float | None) -> str:
    got = f"it got {own:.2f} of the {due:.2f} cpus that were due to it under its quota"
    if outside is not None and outside >= 0.25:
        return (
            f"{got}: beside skyctl's own, processes used {outside:.2f} processors of this machine; "
            "its times hold only under the same load"
        )
    return f"{got}: the nodes on this machine want more processors than it has"


def _of_card(seen: Watched) -> Conditions:
    """Before we used it, so whatever it did was for others."""
    card: Mapping[str, Any] = seen.counts.get("card") or {}
    busy, held = card.get("busy"), card.get("held_bytes")
    notes = []
    if busy is not None and busy >= CARD_BUSY:
        notes.append(
            f"other processes kept it busy {busy:.0%} of the time before it was measured: "
            "its times hold only under the same load"
        )
    if held is not None and held >= CARD_HELD_BYTES:
        notes.append(f"{held / GIB:.1f} GiB of its memory were held by others before it was measured")
    return Conditions(
        wall_s=float(seen.counts["wall_s"]),
        share=None if busy is None else 1.0 - busy,
        notes=tuple(notes),
    )


def across_numa(threads: int, numa_nodes: int | None) -> str | None:
    """A word where a device's threads may work in several NUMA nodes."""
    if numa_nodes is None or numa_nodes < 2 or threads < 2:
        return None
    return (
        f"its {threads} threads may spread over {numa_nodes} NUMA nodes, where memory is slower to reach: "
        "to keep them in one, start the node's sshd or python under numactl"
    )


def share_threads(wanted: Sequence[int | None], default: Sequence[int], cpus: float) -> list[int]:
    """Threads of the CPU devices that draw on the same processors: equal parts, at least one each.

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


def _count(cpus: float) -> str:
    return f"{cpus:g} {'cpu' if cpus == 1 else 'cpus'}"
