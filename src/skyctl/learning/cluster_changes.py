"""The changes in a cluster since it was measured: devices, versions, processors, memory.

Used before a run, where the plan remembers what was measured, and by ``probe --quick``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass

from skyctl.errors import MismatchError
from skyctl.records.base import GIB
from skyctl.records.cluster import split_device_id
from skyctl.records.plan import Machine, Plan
from skyctl.records.profile import Profile
from skyctl.worker.rank_events import EnvironmentEvent

CPUS_TOLERANCE = 0.10
"""How far the number of processors may be off; a quota is a fraction."""
MEMORY_TOLERANCE = 0.02
"""How far what is free may be below the predicted need, which is no more exact than that."""


@dataclass(frozen=True)
class ClusterChange:
    """One thing that is not as it was, in words. ``change``: by how much, where that is a number."""

    where: str
    what: str
    then: str
    now: str
    change: str = ""


class ClusterChangedError(MismatchError):
    """The cluster is not what the plan was made for; ``changes`` has all of it."""

    def __init__(self, message: str, changes: Sequence[ClusterChange], *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.changes = [asdict(change) for change in changes]


def machines_of(profile: Profile, ids: Collection[str]) -> tuple[Machine, ...]:
    """The machines of those devices, as plans remember them, as far as their nodes are in the profile."""
    nodes = {node.name: node for node in profile.nodes}
    return tuple(
        Machine(
            device=device.id,
            name=device.name,
            cpu_model=nodes[device.node].cpu_model,
            cpus=nodes[device.node].cpus,
            threads=device.threads,
            python=nodes[device.node].python,
            torch=nodes[device.node].torch,
        )
        for device in profile.devices
        if device.id in ids and device.node in nodes
    )


def machine_changes(then: Machine, now: Machine) -> list[ClusterChange]:
    """The differences of one device. Of Python only the first two numbers count, of torch everything."""
    # Of a CPU that is another one, device and processor are the same change.
    same_twice = then.name != now.name and then.name == then.cpu_model
    changes = [
        ClusterChange(then.device, what, before, after)
        for what, before, after in (
            ("device", then.name, now.name),
            *([] if same_twice else [("processor", then.cpu_model, now.cpu_model)]),
            ("torch", then.torch, now.torch),
            ("Python", _minor_version(then.python), _minor_version(now.python)),
            ("threads", _number_text(then.threads), _number_text(now.threads)),
        )
        if before != after
    ]
    if abs(now.cpus / then.cpus - 1) > CPUS_TOLERANCE:
        change = f"{now.cpus / then.cpus - 1:+.0%}"
        changes.append(ClusterChange(then.device, "cpus", f"{then.cpus:g}", f"{now.cpus:g}", change))
    return changes


def plan_changes(
    plan: Plan, facts: Mapping[int, EnvironmentEvent], *, shares: bool = False
) -> list[ClusterChange]:
    """Everything in which what the ranks found differs from what the plan was made for.

    Args:
        facts: by rank (stages, then helpers); a plan that remembers no machines is checked for memory, and
            for versions of torch that differ between its ranks.
        shares: other runs are on the devices, too, and ranks wait for memory: what is free now is no change.
    """
    measured = {machine.device: machine for machine in plan.machines}
    devices = [*(stage.device for stage in plan.placed_stages), *plan.helpers]
    changes: list[ClusterChange] = []
    for rank, device in enumerate(devices):
        fact, then = facts[rank], measured.get(device)
        if fact.device_name is None:
            was = then.name if then is not None else split_device_id(device)[1]
            there = ", ".join(fact.devices)
            changes.append(
                ClusterChange(device, "device", was, f"not there, or can't be used ({there} found)")
            )
        elif then is not None:
            changes += machine_changes(then, _found_machine(then, fact))
    if not measured:
        changes += _torch_changes(devices, facts)
    return changes if shares else changes + _memory_changes(plan, devices, facts)


def entering_changes(
    plan: Plan, device: str, fact: EnvironmentEvent, beside: EnvironmentEvent | None, need: float
) -> list[ClusterChange]:
    """The changes that keep a device from entering a run of the plan, and those since it was measured.

    Args:
        fact: what its rank found.
        beside: what a rank under way had found; None: that is not known any more.
        need: bytes that it is predicted to take.
    """
    if fact.device_name is None:
        there = ", ".join(fact.devices)
        return [ClusterChange(device, "device", split_device_id(device)[1], f"not there ({there} found)")]
    then = next((machine for machine in plan.machines if machine.device == device), None)
    changes = [] if then is None else machine_changes(then, _found_machine(then, fact))
    if then is None and beside is not None and _minor_version(beside.torch) != _minor_version(fact.torch):
        changes.append(ClusterChange(device, "torch", f"{beside.torch} on others", fact.torch))
    if fact.memory_bytes is not None:
        changes += _too_little([device], need, fact.memory_bytes)
    return changes


def _found_machine(then: Machine, fact: EnvironmentEvent) -> Machine:
    return Machine(
        device=then.device,
        name=str(fact.device_name),
        cpu_model=fact.cpu_model,
        cpus=fact.cpus,
        threads=None if then.threads is None else fact.threads,
        python=fact.python,
        torch=fact.torch,
    )


def _torch_changes(devices: Sequence[str], facts: Mapping[int, EnvironmentEvent]) -> list[ClusterChange]:
    """Each rank whose torch is of another version (its first two numbers) than the first rank's."""
    first = facts[0].torch
    return [
        ClusterChange(device, "torch", f"{first} on {devices[0]}", facts[rank].torch)
        for rank, device in enumerate(devices)
        if _minor_version(facts[rank].torch) != _minor_version(first)
    ]


def _memory_changes(
    plan: Plan, devices: Sequence[str], facts: Mapping[int, EnvironmentEvent]
) -> list[ClusterChange]:
    """The devices with less free memory than the plan needs; those that draw from one pot need it together.

    Helpers, which hold no more than a few chunks, are left out.
    """
    needs = {replica.device: replica.memory_bytes for replica in plan.predicted.replicas}
    pots: dict[str, list[int]] = {}
    for rank, device in enumerate(devices):
        if facts[rank].memory_bytes is not None and device in needs:
            pots.setdefault(str(facts[rank].memory_scope or device), []).append(rank)
    changes = []
    for ranks in pots.values():
        held = sum(facts[rank].own_bytes for rank in ranks)  # by ranks that wait to build
        free = min((facts[rank].memory_bytes or 0.0) + held - facts[rank].own_bytes for rank in ranks)
        need = sum(needs[devices[rank]] for rank in ranks)
        changes += _too_little([devices[rank] for rank in ranks], need, free)
    return changes


def local_memory_changes(plan: Plan, nodes: Collection[str], free_bytes: float) -> list[ClusterChange]:
    """The shortage if ranks on this machine need more memory together than is free, before any is started.

    ``plan_changes`` asks the ranks themselves, and as many as fill the memory by starting could not answer.

    Args:
        nodes: those that are this machine; accelerators, whose memory is their own, are left out.
    """
    needs: dict[str, float] = {}
    for replica in plan.predicted.replicas:
        node, device = split_device_id(replica.device)
        if node in nodes and device.startswith("cpu:"):
            needs[replica.device] = replica.memory_bytes
    return _too_little(list(needs), sum(needs.values()), free_bytes)


def _too_little(devices: Sequence[str], need: float, free: float) -> list[ClusterChange]:
    """The change where devices need more bytes than are free, else none."""
    if free >= need * (1 - MEMORY_TOLERANCE):
        return []
    needed, there = f"{need / GIB:.2f} GiB needed", f"{free / GIB:.2f} GiB"
    return [ClusterChange(", ".join(devices), "free memory", needed, there, f"{free / need - 1:+.0%}")]


def change_table(changes: Sequence[ClusterChange]) -> list[str]:
    """The changes as aligned lines under a heading."""
    rows = [("where", "what", "then", "now", "change")]
    rows += [(change.where, change.what, change.then, change.now, change.change) for change in changes]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def refuse_changes(plan: Plan, changes: Sequence[ClusterChange]) -> None:
    """Raises ClusterChangedError, with all that was found, where there is anything."""
    if not changes:
        return
    source = plan.workload.source if plan.workload is not None else "WORKLOAD"
    raise ClusterChangedError(
        "the cluster is not what the plan was made for; nothing was trained:"
        + "".join(f"\n  {line}" for line in change_table(changes)),
        changes,
        hint=f"measure and plan again (skyctl probe {source}, then plan), or launch it all the same with "
        "--ignore-changes",
    )


def _minor_version(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _number_text(value: int | None) -> str:
    return "" if value is None else str(value)
