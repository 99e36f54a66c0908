"""Keeps freed memory in the process, so that the same work does not pay for page faults once and not again.

glibc gives a large block back to the kernel when it is freed at the top of the heap, and takes it anew the
next time: a tenth of a small layer's time, or nothing, depending on what else happens to lie above it.
"""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress

_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
_ARENA_MAX = -8
_MMAP_BYTES = 32 << 20  # the most that glibc takes
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


def share_one_heap() -> None:
    """Threads get no heaps of their own: then all that is freed can be given back. Call it first of all."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_ARENA_MAX, 1)


def give_back_freed_memory() -> None:
    """What has been freed goes back to the kernel, once, where the C library can.

    What was freed at the top of another heap than the first stays: glibc trims that one alone.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
