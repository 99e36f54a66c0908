"""The planner: is it exact, how good are heuristic and baselines, how long does it take?

Prints one JSON line a table; ``--write`` puts the tables into docs/planner.md. One process and one thread,
but for the two largest problems, whose memory is measured in processes of their own.

    make bench-planner                              # everything, about a quarter of an hour, and the document
    make bench-planner ARGS="--only exactness"      # one section; also: quality, iteration, time, milp
    python benchmarks/planner.py --quick            # a few instances of each, nothing is written
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator

from tables.exactness import exactness
from tables.milp import milp
from tables.page import Table, write
from tables.quality import quality_bottleneck, quality_iteration
from tables.timing import CASES, measured, timing, warm_up

SECTIONS = ("exactness", "quality", "iteration", "time", "milp")


def main() -> None:
    """Runs the sections asked for."""
    given = _arguments()
    if given.case is not None:
        warm_up()
        print(json.dumps(measured(given.case)), flush=True)
        return
    for section, tables in _sections(given).items():
        if section not in (given.only or SECTIONS):
            continue
        made = []
        for table in tables():
            print(table.line(), flush=True)
            made.append(table)
        if given.write:
            write(section, made, _command(section, given))


def _sections(given: argparse.Namespace) -> dict[str, Callable[[], Iterator[Table]]]:
    names = ["f1", "f2c"] if given.quick else None
    return {
        "exactness": lambda: exactness(given.exactness, limit_s=60.0),
        "quality": lambda: quality_bottleneck(given.quality, given.quality_limit),
        "iteration": lambda: quality_iteration(given.iteration, given.iteration_limit),
        "time": lambda: timing(names),
        "milp": lambda: milp(given.milp_limit),
    }


def _command(section: str, given: argparse.Namespace) -> str:
    """How to get one section's tables again."""
    flags = {
        "exactness": f" --exactness {given.exactness}",
        "quality": f" --quality {given.quality} --quality-limit {given.quality_limit:g}",
        "iteration": f" --iteration {given.iteration} --iteration-limit {given.iteration_limit:g}",
        "milp": f" --milp-limit {given.milp_limit:g}",
    }
    quick = " --quick" if given.quick else ""
    return f'make bench-planner ARGS="--only {section}{flags.get(section, "")}{quick}"'


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", action="append", choices=SECTIONS, help="this section (may be repeated)")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/planner.md")
    parser.add_argument("--quick", action="store_true", help="few instances, short limits, the small cases")
    parser.add_argument("--exactness", type=int, help="instances against brute force (default 500)")
    parser.add_argument("--quality", type=int, help="instances a size, bottleneck (default 200)")
    parser.add_argument("--quality-limit", type=float, help="seconds for optimal, each (default 1)")
    parser.add_argument("--iteration", type=int, help="instances a size, iteration (default 15)")
    parser.add_argument("--iteration-limit", type=float, help="seconds for optimal, each (default 2)")
    parser.add_argument("--milp-limit", type=float, help="seconds for each published MILP (default 15)")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)  # the child whose memory is measured
    given = parser.parse_args()
    full = {"exactness": 500, "quality": 200, "quality_limit": 1.0, "iteration": 15}
    full |= {"iteration_limit": 2.0, "milp_limit": 15.0}
    few = {"exactness": 30, "quality": 3, "quality_limit": 0.5, "iteration": 2}
    few |= {"iteration_limit": 0.5, "milp_limit": 2.0}
    for name, value in (few if given.quick else full).items():
        if getattr(given, name) is None:
            setattr(given, name, value)
    return given


if __name__ == "__main__":
    main()
