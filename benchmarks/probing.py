"""The probe: are its figures right, does it see what disturbs it, and how long does it take?

Prints one JSON line a case. Needs root (network namespaces, cgroups, sshd).

    python benchmarks/probing.py                     # everything
    python benchmarks/probing.py --only quotas       # one section
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from typing import Any

from probes import links, uplink
from probes.duration import duration, local
from probes.quotas import busy, quotas

SECTIONS: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
    "quotas": quotas,
    "busy": busy,
    "links": links.section,
    "uplink": uplink.section,
    "duration": duration,
    "local": local,
}


def main() -> None:
    """Runs the sections asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", action="append", choices=SECTIONS, help="this section (may be repeated)")
    given = parser.parse_args()
    for name, section in SECTIONS.items():
        if name in (given.only or SECTIONS):
            for line in section():
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
