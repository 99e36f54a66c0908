"""The effects of rhythms of synchronisation on steps and losses. One JSON line a case.

Needs root (network namespaces, cgroups, sshd), but for ``--case loss``.

    python benchmarks/rhythms.py delay                      # every case, some ten minutes
    python benchmarks/rhythms.py delay --case sleeping      # one of them (may be repeated)
    python benchmarks/rhythms.py plot                       # docs/images/rhythms.png, without root
"""

from __future__ import annotations

import argparse
import json

from runs.delay import CASES, delay

RHYTHMS = {"delay": (delay, CASES)}


def main() -> None:
    """Runs the cases asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parsers = parser.add_subparsers(dest="rhythm", required=True)
    for name, (_, cases) in RHYTHMS.items():
        parsers.add_parser(name).add_argument("--case", action="append", choices=cases)
    parsers.add_parser("plot")
    given = parser.parse_args()
    if given.rhythm == "plot":
        from runs.rhythm_plots import draw  # late: needs matplotlib

        print(json.dumps({"benchmark": "plot", "picture": draw().name}))
        return
    run, cases = RHYTHMS[given.rhythm]
    for line in run(given.case or cases):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
