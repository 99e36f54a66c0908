"""What of a process's memory is not its own: it was forked from a nursery (``agent/nursery.py``).

Resident size counts pages in full that many processes share, so for such a process it says nothing of what
one more of them takes. Elsewhere all of it is counted as the process's own, as a stage alone on its node has
it.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from skyctl.agent.nursery import born_here


class Others(NamedTuple):
    """Bytes resident here that others hold: written by the nursery and not here since; of everything, the
    part that falls to others when each sharer is given an equal one (``Rss`` less ``Pss``)."""

    anonymous_bytes: int
    all_bytes: int


def others() -> Others:
    """Now; nothing where this process was not forked from a nursery, or the kernel does not say."""
    if not born_here():
        return Others(0, 0)
    sizes: dict[str, int] = {}
    try:
        for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
            key, _, rest = line.partition(":")
            sizes[key] = int(rest.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        return Others(0, 0)
    return Others(sizes.get("Shared_Dirty", 0), max(0, sizes.get("Rss", 0) - sizes.get("Pss", 0)))
