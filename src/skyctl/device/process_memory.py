"""The memory that this process holds, and keeping the memory that it has freed.

Of a process that was forked by a fork server (``agent/forkserver.py``) the resident size counts pages in full
that many processes share; it says nothing of what one more of them takes. Elsewhere all of it is counted as
the process's own, as for a stage that is alone on its node.

Freed memory is kept, so that the same work does not pay for page faults once and not again: glibc gives a
large block back to the kernel when it is freed at the top of the heap, and takes it anew the next time. That
is a tenth of a small layer's time, or nothing, depending on what else is above it.
"""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from skyctl.agent.forkserver import is_forked_process


class SharedPages(NamedTuple):
    """Bytes resident here that others hold: written by the fork server and not here since; of everything, the
    part that falls to others when each sharer is given an equal one (``Rss`` less ``Pss``)."""

    anonymous_bytes: int
    all_bytes: int


def shared_pages() -> SharedPages:
    """The shared pages as they are now; zeros where this process was not forked or the kernel is silent."""
    if not is_forked_process():
        return SharedPages(0, 0)
    sizes: dict[str, int] = {}
    try:
        for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
            key, _, rest = line.partition(":")
            sizes[key] = int(rest.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        return SharedPages(0, 0)
    return SharedPages(sizes.get("Shared_Dirty", 0), max(0, sizes.get("Rss", 0) - sizes.get("Pss", 0)))


def private_bytes() -> int:
    """This process's own (anonymous) resident pages; 0 where the kernel does not say."""
    return max(0, _status_bytes("RssAnon") - shared_pages().anonymous_bytes)


def resident_bytes() -> int:
    """All of this process's resident pages, shared libraries included, less what falls to others."""
    return _own_bytes(_status_bytes("VmRSS"), shared_pages().all_bytes)


def peak_resident_bytes() -> int:
    """The most that this process has held so far, less what fell to others when it had grown to that."""
    peak = _status_bytes("VmHWM")
    return _own_bytes(peak, _shared_bytes_at(peak >> 20))


@lru_cache(maxsize=1)
def _shared_bytes_at(peak_mib: int) -> int:  # noqa: ARG001 — the key
    """Read anew once the peak has grown by a MiB: the kernel walks over every page, which takes 5 ms."""
    return shared_pages().all_bytes


def _own_bytes(resident: int, shared: int) -> int:
    """Of pages that the kernel counts as resident (0: it does not say), without those that fall to others."""
    if resident:
        return max(0, resident - shared)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) if sys.platform == "darwin" else int(peak) * 1024


def _status_bytes(key: str) -> int:
    """A figure of ``/proc/self/status``; 0 where there is none."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return 0


_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
_ARENA_MAX = -8
_MMAP_BYTES = 32 << 20  # the most that glibc takes
_LARGE_BYTES = 1 << 20  # smaller ones cost more time, as page faults, than they hold
_TRIM_BYTES = 1 << 30


def keep_freed_memory() -> bool:
    """Tells glibc's malloc; whether it listened (it is the C library of most Linux systems, not of all)."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _MMAP_BYTES)) and bool(mallopt(_TRIM_THRESHOLD, _TRIM_BYTES))


def give_back_large_blocks() -> None:
    """From now on large blocks go back to the kernel as they are freed, where the C library can.

    Kept, they leave gaps between the small ones that live on: several times what a stage holds that
    recomputes its layers one by one.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)


def share_one_heap() -> None:
    """Threads get no heaps of their own: then all that is freed can be given back. Call it first of all."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_ARENA_MAX, 1)


def give_back_freed_memory() -> None:
    """Gives freed memory back to the kernel, once, where the C library can.

    Memory freed at the top of another heap than the first stays: glibc trims the first one alone.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
