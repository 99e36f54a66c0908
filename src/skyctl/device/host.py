"""Processors and memory of the machine that this process runs on. Needs no torch."""

from __future__ import annotations

import os
from pathlib import Path


def cpu_affinity() -> list[int] | None:
    """The processors that this process may be scheduled on (affinity and cpuset); None: not told."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def usable_cpus() -> int:
    """How many processors this process may be scheduled on, at least 1."""
    return max(1, len(cpu_affinity() or ()) or os.cpu_count() or 1)


def memory_bytes() -> tuple[int, int]:
    """(total, available) bytes of the machine, whatever a cgroup allows."""
    values: dict[str, int] = {}
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            key, _, rest = line.partition(":")
            values[key] = int(rest.split()[0]) * 1024
        return values["MemTotal"], values.get("MemAvailable", values["MemFree"])
    except (OSError, KeyError, ValueError, IndexError):
        page = os.sysconf("SC_PAGE_SIZE")
        total = page * os.sysconf("SC_PHYS_PAGES")
        return total, page * os.sysconf("SC_AVPHYS_PAGES") if "SC_AVPHYS_PAGES" in os.sysconf_names else total
