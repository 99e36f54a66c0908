"""Load by others on a device's processors while it was measured, and what it means for its times. Pure.

Every device counts what its own process used, what all used under its quota, and what all used on the
machine's processors. The probe's own processes on one machine are no strangers to each other: training will
run them side by side as well.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyctl.agent.process_tree import read_boot_id
from skyctl.device.host import cpu_affinity
from skyctl.probe.device_probes import DeviceProbe
from skyctl.probe.resource_shares import assign_threads
from skyctl.records.base import GIB
from skyctl.records.profile import Conditions

OTHERS_SHARE = 0.08
"""Others are worth a word from this part of the processors on: the probe's helpers, SSH and the kernel stay
below (docs/probing.md)."""

OTHERS_CPUS = 0.03
"""And from so many processors on: on a tenth of one, an agent's heartbeat is a percent or two."""

SHORT_SHARE = 0.12
"""A device that falls short of its due by more than this part of it gets a note."""

STOOD_STILL_S = 0.3
STOLEN_SHARE = 0.05
GPU_BUSY_SHARE = 0.05
GPU_HELD_BYTES = 512 << 20


@dataclass(frozen=True)
class LoadReading:
    """The counts of one device's process (``probe/node/load_counters.py``).

    ``scope``: equal for devices that draw on the same processors; ``machine``: for those of one machine.
    ``cpus``: how many the scope has; ``bound``: by a quota. ``slowdown``: emulated, part of the time asleep.
    ``allowed``: the processors that it may use, which ``machine_s`` is counted on; empty: not told.
    """

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
class CpuUse:
    """The processors' time that a process used, spread over those that it may use (empty: not told)."""

    cpus: float
    allowed: frozenset[int] = frozenset()

    def of(self, mine: frozenset[int]) -> float:
        """The part of it that falls on these processors."""
        if not mine or not self.allowed:
            return self.cpus
        return self.cpus * len(mine & self.allowed) / len(self.allowed)


def judge_load(
    devices: Mapping[str, LoadReading], launcher: Mapping[str, CpuUse] | None = None
) -> dict[str, Conditions]:
    """The conditions that each device was measured under, by device id.

    Args:
        launcher: by machine, what the launcher itself used there.
    """
    conditions = {}
    for name, seen in devices.items():
        if not seen.on_cpu:
            conditions[name] = _gpu_conditions(seen)
            continue
        own = sum(
            other.rate("own_s") or 0.0
            for other in devices.values()
            if other.scope == seen.scope and other.machine == seen.machine
        )
        used = [
            CpuUse(other.rate("own_s") or 0.0, other.allowed)
            for other in devices.values()
            if other.machine == seen.machine
        ]
        used += [use for machine, use in (launcher or {}).items() if machine == seen.machine]
        ours = sum(use.of(seen.allowed) for use in used)
        conditions[name] = _cpu_conditions(seen, own, ours, _demand(devices, seen))
    return conditions


def _demand(devices: Mapping[str, LoadReading], seen: LoadReading) -> float:
    """How many processors the devices of its scope can use together."""
    wants = [d.threads / d.slowdown for d in devices.values() if d.on_cpu and d.scope == seen.scope]
    return min(seen.cpus, float(sum(wants)))


def _cpu_conditions(seen: LoadReading, own: float, ours: float, demand: float) -> Conditions:
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
        if others >= max(OTHERS_CPUS, OTHERS_SHARE * seen.cpus):
            notes.append(
                f"other processes used {others:.2f} of this node's {_cpu_count_text(seen.cpus)} "
                "while it was measured: its times hold only under the same load"
            )
        short = 0.0 if seen.slowdown > 1.0 or left <= 0 else 1.0 - _cpus_received(seen, own) / left
        if seen.bound and short > SHORT_SHARE:
            share *= 1.0 - short
            notes.append(_short_text(own, left, None if outside is None else outside - others))
    stood_s = float(seen.counts.get("left_out_s") or 0.0)
    if stood_s >= STOOD_STILL_S:
        notes.append(
            f"it waited {stood_s:.1f} s for something else than a processor (a disk?): left out of its times"
        )
    stolen = seen.rate("steal_s")
    stolen_share = None if stolen is None else stolen / float(seen.counts.get("machine_cpus") or 1)
    if stolen_share is not None and stolen_share >= STOLEN_SHARE:
        notes.append(
            f"the machine under it took {stolen:.2f} processors away (steal time): another guest is busy"
        )
    if seen.counts.get("overheated"):
        notes.append("its processor was throttled for its heat while it was measured")
    mine_rate = seen.rate("own_s")
    return Conditions(
        wall_s=float(seen.counts["wall_s"]),
        own_cpus=mine_rate,
        others_cpus=others,
        share=share,
        notes=tuple(notes),
        stolen_share=stolen_share and min(1.0, stolen_share),
        halted_share=seen.counts.get("halted_share"),
    )


def _cpus_received(seen: LoadReading, own: float) -> float:
    """Processors that the probe got, and those it did not ask for while it stood still."""
    ran, waited = seen.rate("ran_s"), seen.rate("waited_s")
    if ran is None or waited is None or seen.threads > 1:
        return own
    asleep = max(0.0, 1.0 - ran - waited)
    return own + asleep * min(1.0, seen.cpus)


def _short_text(own: float, due: float, outside: float | None) -> str:
    got = f"it got {own:.2f} of the {due:.2f} cpus that were due to it under its quota"
    if outside is not None and outside >= 0.25:
        return (
            f"{got}: other processes than skyctl's used {outside:.2f} processors of this machine; "
            "its times hold only under the same load"
        )
    return f"{got}: the nodes on this machine want more processors than it has"


def _gpu_conditions(seen: LoadReading) -> Conditions:
    """Its state before the probe used it, so whatever it did was for others."""
    gpu: Mapping[str, Any] = seen.counts.get("gpu") or {}
    busy, held = gpu.get("busy"), gpu.get("held_bytes")
    notes = []
    if busy is not None and busy >= GPU_BUSY_SHARE:
        notes.append(
            f"other processes kept it busy {busy:.0%} of the time before it was measured: "
            "its times hold only under the same load"
        )
    if held is not None and held >= GPU_HELD_BYTES:
        notes.append(f"{held / GIB:.1f} GiB of its memory were held by others before it was measured")
    return Conditions(
        wall_s=float(seen.counts["wall_s"]),
        share=None if busy is None else 1.0 - busy,
        notes=tuple(notes),
    )


def numa_note(threads: int, numa_nodes: int | None) -> str | None:
    """A note where a device's threads may work in several NUMA nodes."""
    if numa_nodes is None or numa_nodes < 2 or threads < 2:
        return None
    return (
        f"its {threads} threads may spread over {numa_nodes} NUMA nodes, where memory is slower to reach: "
        "to keep them in one, start the node's sshd or python under numactl"
    )


def _cpu_count_text(cpus: float) -> str:
    return f"{cpus:g} {'cpu' if cpus == 1 else 'cpus'}"


class LauncherUse:
    """The launcher's own use of its machine, counted from when this is made."""

    def __init__(self) -> None:
        self._start = time.monotonic(), time.process_time()

    def by_machine(self) -> dict[str, CpuUse]:
        """By the machine's boot id, what was used so far; empty where the machine can't be told."""
        wall_s, cpu_s = time.monotonic() - self._start[0], time.process_time() - self._start[1]
        boot = read_boot_id()
        allowed = frozenset(cpu_affinity() or ())
        return {boot: CpuUse(cpu_s / wall_s, allowed)} if boot and wall_s > 0 else {}


def device_conditions(members: Sequence[DeviceProbe], launcher: LauncherUse) -> dict[str, Conditions]:
    """The conditions by device id; a device whose process counted nothing has none."""
    sharing = assign_threads(members)
    conditions = judge_load(
        {m.id: _load_reading(m) for m in members if m.measured.get("watched")}, launcher.by_machine()
    )
    for member in members:
        own = conditions.get(member.id)
        if own is not None:
            notes = (_numa_note(member), _threads_note(member, members, sharing), _gloo_note(member))
            more = [note for note in notes if note]
            conditions[member.id] = own.model_copy(update={"notes": (*own.notes, *more)})
    return conditions


def _load_reading(member: DeviceProbe) -> LoadReading:
    facts = member.facts
    machine = str(facts.get("boot_id", ""))
    return LoadReading(
        scope=str(facts.get("cpu_scope", machine)),
        machine=machine,
        cpus=float(facts["cpus"]),
        bound=bool(facts.get("bound")),
        threads=int(member.measured["threads"]),
        on_cpu=member.on_cpu,
        slowdown=member.node.slowdown,
        counts=member.measured["watched"],
        allowed=member.affinity,
    )


def _numa_note(member: DeviceProbe) -> str | None:
    if not member.on_cpu:
        return None
    return numa_note(int(member.measured["threads"]), member.facts.get("numa_nodes"))


def _gloo_note(member: DeviceProbe) -> str | None:
    fault = member.measured.get("gloo_error")
    return None if fault is None else f"messages over Gloo could not be measured: {fault}"


def _threads_note(member: DeviceProbe, members: Sequence[DeviceProbe], sharing: dict[int, int]) -> str | None:
    """The note on a device that gets fewer threads than it would alone; None for others."""
    count = sharing.get(id(member))
    if count is None or member.node.threads is not None or count >= int(member.facts["threads"]):
        return None
    others = sorted({m.node.name for m in members if m is not member and m.on_cpu and member.shares(m)})
    words = f"{count} thread{'' if count == 1 else 's'} instead of {member.facts['threads']}"
    if not others:
        return f"it has {words}: its quota allows no more"
    named = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
    return (
        f"it has {words}, because it shares its processors with {named} (`threads` in cluster.yaml sets it)"
    )
