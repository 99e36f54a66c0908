"""The runtime: is a step as short as devices and links allow, and does the prediction hold?

Prints one JSON line a case. Needs root (network namespaces, cgroups, sshd) but for ``published``.

    make bench-runtime                               # everything, half an hour or more
    make bench-runtime ARGS="--only sleeping"        # one section; also: unequal, prediction, published
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from typing import Any

from runs.prediction import prediction
from runs.published import published
from runs.sleeping import sleeping
from runs.unequal import unequal

SECTIONS: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
    "sleeping": sleeping,
    "published": published,
    "unequal": unequal,
    "prediction": prediction,
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
