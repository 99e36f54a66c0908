"""The limits a container, a slice or a lab puts on this process: CPU quota and memory, cgroup v1 and v2.

Files are found by mount point (``/proc/self/mountinfo``), not by a fixed path: ``ip netns exec`` and some
containers hide or move ``/sys/fs/cgroup``. A limit that can't be seen is None with a reason; the time-slice
measurement sees a quota all the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

_T = TypeVar("_T")

PROC = Path("/proc")
_UNLIMITED_BYTES = 1 << 60
_CONTROLLERS = {"cpu", "cpuacct", "memory"}


@dataclass(frozen=True)
class Quota:
    """CPU time this process may use: ``cpus`` of ``period_s`` long periods; ``burst_s`` may be saved up.

    ``scope`` names the cgroup whose quota that is, the same for every process it binds.
    ``throttled_s``: how long it has been held back so far, None where not counted. ``used_s``: CPU time that
    all its processes have used so far, None where not counted.
    """

    cpus: float
    period_s: float
    burst_s: float
    scope: str
    throttled_s: float | None
    used_s: float | None = None


@dataclass(frozen=True)
class MemoryLimit:
    """Bytes a cgroup may hold and what it holds; reclaimable file pages are not counted as held."""

    limit_bytes: int
    used_bytes: int
    scope: str

    @property
    def left_bytes(self) -> int:
        """Bytes that the cgroup's processes may still take."""
        return max(0, self.limit_bytes - self.used_bytes)


@dataclass(frozen=True)
class Limits:
    """The tightest of each over the own cgroup and its ancestors. ``unseen``: why a None is unknown."""

    quota: Quota | None
    memory: MemoryLimit | None
    unseen: str | None


def read_limits(proc: Path = PROC) -> Limits:
    """Reads every cgroup that this process is in, up to each mount's root.

    Args:
        proc: the /proc to read (tests give a made-up one whose mounts are ordinary folders).
    """
    try:
        groups = _own_groups((proc / "self/cgroup").read_text())
        mounts = _mounts((proc / "self/mountinfo").read_text())
    except OSError as exc:
        return Limits(None, None, f"no cgroup of this process can be read: {exc.strerror or exc}")
    quotas: list[tuple[Quota, tuple[str, ...]]] = []
    memories: list[MemoryLimit] = []
    used: dict[tuple[str, ...], float] = {}
    seen = False
    for controllers, path in groups:
        for mounted, root, point in mounts:
            if (mounted is None) != (controllers is None):
                continue
            if mounted is not None and controllers is not None and not mounted & controllers:
                continue
            for folder in _ancestors(path, root, Path(point)):
                seen = True
                used |= _read_usage(folder, point)
                quotas += [(quota, _path_below(folder, point)) for quota in _as_list(_read_quota(folder))]
                memories += _as_list(_read_memory(folder))
    tightest, at = min(quotas, key=lambda q: q[0].cpus, default=(None, ()))
    return Limits(
        quota=None if tightest is None else replace(tightest, used_s=used.get(at)),
        memory=min(memories, key=lambda m: m.left_bytes, default=None),
        unseen=None if seen else "no cgroup file system is mounted where this process can see it",
    )


def _as_list(value: _T | None) -> list[_T]:
    return [] if value is None else [value]


def _own_groups(text: str) -> list[tuple[frozenset[str] | None, str]]:
    """``/proc/self/cgroup`` → (v1 controllers, or None for v2; path)."""
    groups: list[tuple[frozenset[str] | None, str]] = []
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        controllers = frozenset(names.split(",")) & _CONTROLLERS
        if number == "0" and not names:
            groups.append((None, path))
        elif controllers:
            groups.append((controllers, path))
    return groups


def _mounts(text: str) -> list[tuple[frozenset[str] | None, str, str]]:
    """``/proc/self/mountinfo`` → (v1 controllers, or None for v2; root of the mount; mount point)."""
    mounts: list[tuple[frozenset[str] | None, str, str]] = []
    for line in text.splitlines():
        left, separator, right = line.partition(" - ")
        fields, kinds = left.split(), right.split()
        if not separator or len(fields) < 5 or len(kinds) < 3:
            continue
        root, point = (field.encode().decode("unicode_escape") for field in fields[3:5])
        if kinds[0] == "cgroup2":
            mounts.append((None, root, point))
        elif kinds[0] == "cgroup":
            mounts.append((frozenset(kinds[2].split(",")) & _CONTROLLERS, root, point))
    return mounts


def _ancestors(path: str, root: str, point: Path) -> list[Path]:
    """The process's cgroup and its ancestors as folders under the mount, innermost first.

    Inside a container the mount's root is the container's own cgroup: its prefix is stripped.
    """
    prefix = root.rstrip("/")
    if prefix and (path == prefix or path.startswith(prefix + "/")):
        path = path[len(prefix) :]
    parts = [part for part in path.split("/") if part not in ("", ".", "..")]
    folders = [point.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
    return [folder for folder in folders if folder.is_dir()]


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None


def _read_stat(path: Path) -> dict[str, int]:
    try:
        pairs = (line.split() for line in path.read_text().splitlines())
        return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
    except OSError:
        return {}


def _cgroup_id(folder: Path) -> str:
    status = folder.stat()
    return f"{status.st_dev}:{status.st_ino}"


def _read_quota(folder: Path) -> Quota | None:
    stat = _read_stat(folder / "cpu.stat")
    if (folder / "cpu.max").is_file():
        try:
            quota_text, period_text = (folder / "cpu.max").read_text().split()[:2]
        except (OSError, ValueError):
            return None
        if quota_text == "max":
            return None
        quota_us, period_us = int(quota_text), int(period_text)
        burst_us = _read_number(folder / "cpu.max.burst") or 0
        throttled_s = stat["throttled_usec"] / 1e6 if "throttled_usec" in stat else None
    else:
        quota, period = _read_number(folder / "cpu.cfs_quota_us"), _read_number(folder / "cpu.cfs_period_us")
        if quota is None or quota <= 0 or not period:
            return None
        quota_us, period_us = quota, period
        burst_us = _read_number(folder / "cpu.cfs_burst_us") or 0
        throttled_s = stat["throttled_time"] / 1e9 if "throttled_time" in stat else None
    return Quota(quota_us / period_us, period_us / 1e6, burst_us / 1e6, _cgroup_id(folder), throttled_s)


def _read_usage(folder: Path, point: str) -> dict[tuple[str, ...], float]:
    """CPU seconds used by that cgroup, by its path below the mount (version 1 counts them apart)."""
    nanoseconds = _read_number(folder / "cpuacct.usage")
    if nanoseconds is not None:
        return {_path_below(folder, point): nanoseconds / 1e9}
    microseconds = _read_stat(folder / "cpu.stat").get("usage_usec")
    return {} if microseconds is None else {_path_below(folder, point): microseconds / 1e6}


def _path_below(folder: Path, point: str) -> tuple[str, ...]:
    return folder.relative_to(point).parts


def _read_memory(folder: Path) -> MemoryLimit | None:
    """v1 counts file pages of the whole subtree in ``total_*``; v2's figures are the subtree's already."""
    limit = _read_number(folder / "memory.max")
    used = _read_number(folder / "memory.current")
    prefix = ""
    if limit is None:
        limit = _read_number(folder / "memory.limit_in_bytes")
        used = _read_number(folder / "memory.usage_in_bytes")
        prefix = "total_"
    if limit is None or used is None or limit >= _UNLIMITED_BYTES:
        return None
    stat = _read_stat(folder / "memory.stat")
    reclaimable = stat.get(prefix + "inactive_file", 0) + stat.get(prefix + "active_file", 0)
    return MemoryLimit(limit, max(0, used - reclaimable), _cgroup_id(folder))
