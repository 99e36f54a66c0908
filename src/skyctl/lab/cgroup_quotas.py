"""A cgroup per node for its CPU quota and memory limit; version 1, version 2, or both mounted.

Paths are ``BASE/skyctl-lab-TOKEN/NUMBER``. With version 1 the base is the cgroup of the process that makes
the lab (its own limits go on to hold); with version 2 it is the hierarchy's root, because a cgroup that holds
processes may not hand out controllers.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from skyctl.errors import SkyctlError

_PERIOD_MS = 10
"""Much smoother than the kernel's default of 100 ms."""

_MIN_QUOTA_US = 1000
_LONGEST_US = 1_000_000
"""The kernel's least quota and period, and its longest period."""

_LAB_WEIGHT = 8.0
"""In ordinary processes: other work on this machine slows a lab little, and a busy lab does not stop it."""

_WANTED = ("cpu", "cpuacct", "memory")


@dataclass(frozen=True)
class CgroupLayout:
    """The folders of this machine's cgroups. ``bases``: by controller; version 2 has all at one place."""

    version: int
    bases: dict[str, Path]


def find_cgroups() -> CgroupLayout:
    """Finds the controllers. Raises SkyctlError where there is none for CPU time."""
    own = _own()
    bases: dict[str, Path] = {}
    for mount in list_mounts():
        for controller in _WANTED if mount.kind == "cgroup" else ():
            if controller in mount.options:
                nested = mount.point / own.get(controller, "/").lstrip("/")
                bases[controller] = nested if nested.is_dir() else mount.point
    if "cpu" in bases:
        return CgroupLayout(1, bases)
    for point in (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified")):
        with contextlib.suppress(OSError):
            there = (point / "cgroup.controllers").read_text(encoding="utf-8").split()
            if "cpu" in there:
                return CgroupLayout(2, dict.fromkeys((c for c in _WANTED if c in there), point))
    raise SkyctlError(
        "no cgroup controller for CPU time is mounted, so a lab's nodes can't be made slower",
        hint="mount cgroup2 on /sys/fs/cgroup (in a container: run it with its cgroups writable)",
    )


class Mount(NamedTuple):
    """One mount, and the folder that it is on; ``kind``: of file system."""

    point: Path
    kind: str
    options: list[str]


def list_mounts() -> list[Mount]:
    """All mounts that this process sees."""
    mounts = []
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        point = left.split(" ")[4].replace("\\040", " ")
        mounts.append(Mount(Path(point), kind, options.rpartition(" ")[2].split(",")))
    return mounts


def _own() -> dict[str, str]:
    result = {}
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        result.update(dict.fromkeys(controllers.split(","), path))
    return result


def lab_cgroups(layout: CgroupLayout, token: str) -> list[Path]:
    """The lab's own cgroup in every hierarchy (whether made or not)."""
    return list(dict.fromkeys(base / f"skyctl-lab-{token}" for base in layout.bases.values()))


def make_node_cgroups(layout: CgroupLayout, token: str, number: int, memory_gib: float | None) -> list[Path]:
    """Makes a node's cgroups and sets its memory limit; the quota comes later (``set_quota``).

    Raises:
        SkyctlError: the system refuses, or there is no memory controller and a limit is asked for.
    """
    if memory_gib is not None and "memory" not in layout.bases:
        raise SkyctlError("no cgroup controller for memory is mounted, so memory_gib can't be held")
    folders = []
    try:
        for lab in lab_cgroups(layout, token):
            lab.mkdir(exist_ok=True)
            if layout.version == 2:
                wanted = " ".join(f"+{c}" for c in ("cpu", "memory") if c in layout.bases)
                for above in (lab.parent, lab):
                    (above / "cgroup.subtree_control").write_text(wanted, encoding="utf-8")
            _set_weight(lab, _LAB_WEIGHT)
            folder = lab / str(number)
            folder.mkdir(exist_ok=True)
            folders.append(folder)
            if memory_gib is not None:
                _limit_memory(folder, int(memory_gib * 2**30))
    except OSError as exc:
        raise SkyctlError(
            f"can't make the cgroup of a lab node: {exc}",
            hint="a lab needs cgroups that root may write (in a container: run it privileged)",
        ) from exc
    return folders


def _limit_memory(folder: Path, limit_bytes: int) -> None:
    v1, v2 = folder / "memory.limit_in_bytes", folder / "memory.max"
    if v1.exists():
        v1.write_text(str(limit_bytes), encoding="utf-8")
        swap = folder / "memory.memsw.limit_in_bytes"
        if swap.exists():
            swap.write_text(str(limit_bytes), encoding="utf-8")
    elif v2.exists():
        v2.write_text(str(limit_bytes), encoding="utf-8")
        with contextlib.suppress(OSError):
            (folder / "memory.swap.max").write_text("0", encoding="utf-8")


def quota_us(cpus: float, slice_ms: float | None = None, period_ms: float | None = None) -> tuple[int, int]:
    """(quota, period) in microseconds; the period grows where the quota would be less than 1 ms.

    Args:
        slice_ms: the quota, as far as a period of at most a second allows; None: as ``period_ms`` says.
        period_ms: None: 10 ms.
    """
    period = math.ceil(1000 * ((period_ms or _PERIOD_MS) if slice_ms is None else slice_ms / cpus))
    period = max(period, math.ceil(_MIN_QUOTA_US / cpus), _MIN_QUOTA_US)
    period = min(period, _LONGEST_US)
    return max(_MIN_QUOTA_US, round(cpus * period)), period


def set_quota(
    folders: Iterable[str | Path], cpus: float, slice_ms: float | None = None, period_ms: float | None = None
) -> None:
    """Holds a node to that many cores from now on, and where cores are short, to its share of them."""
    quota, period = quota_us(cpus, slice_ms, period_ms)
    for folder in map(Path, folders):
        _set_weight(folder, cpus)
        if (folder / "cpu.cfs_quota_us").exists():
            (folder / "cpu.cfs_period_us").write_text(str(period), encoding="utf-8")
            _write_burst(folder / "cpu.cfs_burst_us", 0)
            (folder / "cpu.cfs_quota_us").write_text(str(quota), encoding="utf-8")
            _write_burst(folder / "cpu.cfs_burst_us", quota)
        elif (folder / "cpu.max").exists():
            _write_burst(folder / "cpu.max.burst", 0)
            (folder / "cpu.max").write_text(f"{quota} {period}", encoding="utf-8")
            _write_burst(folder / "cpu.max.burst", quota)


def _write_burst(file: Path, burst_us: int) -> None:
    """Lets the rest of a period be used in a later one, up to that much; older kernels know no such thing.

    Quota is handed out in slices of 5 ms to each core that a group runs on, and a slice that one thread woke
    up for is not there for the others: without this, nodes that receive messages lose a tenth of their time
    (docs/decisions.md).
    """
    if file.exists():
        file.write_text(str(burst_us), encoding="utf-8")


def _set_weight(folder: Path, weight: float) -> None:
    """Its share of the processor, in ordinary processes."""
    for name, unit, least, most in (("cpu.shares", 1024, 2, 262144), ("cpu.weight", 100, 1, 10000)):
        if (folder / name).exists():
            value = min(most, max(least, round(weight * unit)))
            (folder / name).write_text(str(value), encoding="utf-8")


def used_cpu_s(folders: Iterable[str | Path]) -> float | None:
    """Seconds of CPU time that a node has used; None where it is not known."""
    for folder in map(Path, folders):
        with contextlib.suppress(OSError, ValueError):
            return int((folder / "cpuacct.usage").read_text(encoding="utf-8")) / 1e9
        with contextlib.suppress(OSError, ValueError):
            fields = dict(line.split() for line in (folder / "cpu.stat").read_text().splitlines())
            if "usage_usec" in fields:
                return int(fields["usage_usec"]) / 1e6
    return None


def used_memory_bytes(folders: Iterable[str | Path]) -> int | None:
    """Bytes that a node holds now (page cache included); None where it is not known."""
    for folder in map(Path, folders):
        for name in ("memory.usage_in_bytes", "memory.current"):
            with contextlib.suppress(OSError, ValueError):
                return int((folder / name).read_text(encoding="utf-8"))
    return None


def list_processes(folder: Path) -> set[int]:
    """Every process in a cgroup or below it."""
    pids: set[int] = set()
    for file in folder.rglob("cgroup.procs"):
        with contextlib.suppress(OSError):
            pids |= set(map(int, file.read_text(encoding="utf-8").split()))
    return pids


def remove_cgroups(folder: Path, within_s: float = 5.0) -> bool:
    """Removes a lab's cgroup with those below it (they must hold no process); True when it is gone."""
    deadline = time.monotonic() + within_s
    while folder.is_dir():
        for root, names, _ in os.walk(folder, topdown=False):
            for name in names:
                with contextlib.suppress(OSError):
                    (Path(root) / name).rmdir()
        with contextlib.suppress(OSError):
            folder.rmdir()
        if folder.is_dir():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
    return True
