"""What a cluster was when it was measured beside what it is now: devices, versions, processors, memory. Pure.

Used before a run, where the plan remembers what was measured, and by ``probe --quick``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from skyctl.errors import MismatchError
from skyctl.records.base import GIB
from skyctl.records.cluster import split_device_id
from skyctl.records.plan import Machine, Plan
from skyctl.records.profile import Profile

Facts = Mapping[str, Any]
"""What a rank found where it was sent (``worker/facts.py``)."""

CPUS = 0.10
"""How far the number of processors may be off; a quota is a fraction."""
MEMORY = 0.02
"""How far what is free may be below the predicted need, which is no more exact than that."""


@dataclass(frozen=True)
class Change:
    """One thing that is not as it was, in words. ``change``: by how much, where that is a number."""

    where: str
    what: str
    then: str
    now: str
    change: str = ""


class ClusterChangedError(MismatchError):
    """The cluster is not what the plan was made for; ``changes`` has all of it."""

    def __init__(self, message: str, changes: Sequence[Change], *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.changes = [asdict(change) for change in changes]


def machines(profile: Profile, ids: Collection[str]) -> tuple[Machine, ...]:
    """What a plan remembers of those devices, as far as their nodes are in the profile."""
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


def of_machine(then: Machine, now: Machine) -> list[Change]:
    """What differs of one device. Of Python only the first two numbers count, of torch everything."""
    found = [
        Change(then.device, what, had, has)
        for what, had, has in (
            ("device", then.name, now.name),
            ("processor", then.cpu_model, now.cpu_model),
            ("torch", then.torch, now.torch),
            ("Python", _minor(then.python), _minor(now.python)),
            ("threads", _number(then.threads), _number(now.threads)),
        )
        if had != has
    ]
    if found and found[0].what == "device" and then.name == then.cpu_model:
        found = [change for change in found if change.what != "processor"]  # a CPU: the same once more
    if abs(now.cpus / then.cpus - 1) > CPUS:
        change = f"{now.cpus / then.cpus - 1:+.0%}"
        found.append(Change(then.device, "cpus", f"{then.cpus:g}", f"{now.cpus:g}", change))
    return found


def of_plan(plan: Plan, facts: Mapping[int, Facts]) -> list[Change]:
    """Everything in which what the ranks found differs from what the plan was made for.

    Args:
        facts: by rank (the stage's number); a plan that remembers no machines is checked for memory, and for
            versions of torch that differ between its ranks.
    """
    measured = {machine.device: machine for machine in plan.machines}
    devices = [stage.replicas[0].device for stage in plan.stages]
    found: list[Change] = []
    for rank, device in enumerate(devices):
        fact, then = facts[rank], measured.get(device)
        if fact["device_name"] is None:
            was = then.name if then is not None else split_device_id(device)[1]
            there = ", ".join(fact["devices"])
            found.append(Change(device, "device", was, f"not there, or can't be used ({there} found)"))
        elif then is not None:
            found += of_machine(then, _machine(then, fact))
    if not measured:
        found += _between_ranks(devices, facts)
    return found + _memory(plan, devices, facts)


def _machine(then: Machine, fact: Facts) -> Machine:
    return Machine(
        device=then.device,
        name=str(fact["device_name"]),
        cpu_model=str(fact["cpu_model"]),
        cpus=float(fact["cpus"]),
        threads=None if then.threads is None else int(fact["threads"]),
        python=str(fact["python"]),
        torch=str(fact["torch"]),
    )


def _between_ranks(devices: Sequence[str], facts: Mapping[int, Facts]) -> list[Change]:
    """Each rank whose torch is of another version (its first two numbers) than the first rank's."""
    first = str(facts[0]["torch"])
    return [
        Change(device, "torch", f"{first} on {devices[0]}", str(facts[rank]["torch"]))
        for rank, device in enumerate(devices)
        if _minor(str(facts[rank]["torch"])) != _minor(first)
    ]


def _memory(plan: Plan, devices: Sequence[str], facts: Mapping[int, Facts]) -> list[Change]:
    """Where less is free than the plan needs; devices that draw from one pot need it together."""
    needs = {replica.device: replica.memory_bytes for replica in plan.predicted.replicas}
    pots: dict[str, list[int]] = {}
    for rank, device in enumerate(devices):
        if facts[rank]["memory_bytes"] is not None:
            pots.setdefault(str(facts[rank]["memory_scope"] or device), []).append(rank)
    found = []
    for ranks in pots.values():
        held = sum(float(facts[rank]["own_bytes"]) for rank in ranks)  # by ranks that wait to build
        free = min(facts[rank]["memory_bytes"] + held - facts[rank]["own_bytes"] for rank in ranks)
        need = sum(needs[devices[rank]] for rank in ranks)
        if free < need * (1 - MEMORY):
            where = ", ".join(devices[rank] for rank in ranks)
            needed, there = f"{need / GIB:.2f} GiB needed", f"{free / GIB:.2f} GiB"
            found.append(Change(where, "free memory", needed, there, f"{free / need - 1:+.0%}"))
    return found


def table(changes: Sequence[Change]) -> list[str]:
    """The changes as aligned lines under a heading."""
    rows = [("where", "what", "then", "now", "change")]
    rows += [(one.where, one.what, one.then, one.now, one.change) for one in changes]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def refuse(plan: Plan, facts: Mapping[int, Facts]) -> None:
    """Raises ClusterChangedError, with all differences, where there is one."""
    found = of_plan(plan, facts)
    if not found:
        return
    source = plan.workload.source if plan.workload is not None else "WORKLOAD"
    raise ClusterChangedError(
        "the cluster is not what the plan was made for; nothing was trained:"
        + "".join(f"\n  {line}" for line in table(found)),
        found,
        hint=f"measure and plan again (skyctl probe {source}, then plan), or launch it all the same with "
        "--ignore-changes",
    )


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _number(value: int | None) -> str:
    return "" if value is None else str(value)
