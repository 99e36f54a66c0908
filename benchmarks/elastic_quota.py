"""One of four ranks gets a third of its quota at step 50: how soon is ``--dynamic`` as good as known?

Both sides take turns, in cgroups of their own. ``dynamic``: equal shares at first, which are dealt anew.
``known``: shares for the paces that ranks have with the quotas of step 50, as a short run measures them, and
nothing is dealt anew. Each rank has one thread, and the same quota but for that one.

Prints one JSON line; all figures are by turn. ``step_s``: medians of steps 53 to 79; ``ratio``: of dynamic's
to known's. ``slow_steps``: how many steps from step 50 take longer than 1.15 × known's median, until one does
not. ``after_fall``: of these and later ones, the ratios. ``shares``: at the end. ``dealt_at``: steps at which
they changed. Needs root.

    python benchmarks/elastic_quota.py [TURNS] [--batch 64] [--cpus 0.4] [--period-ms 10]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from elastic import Ranks, orders
from runs.driver import worker_driver

from skyctl.lab import cgroup_quotas
from skyctl.worker.elastic.microbatch_shares import even_shares

RANKS, VICTIM = 4, 1
STEPS, FALL_STEP, SETTLED_STEP = 80, 50, 53
MEASURED_STEPS = 15
UNHELD = 10.0
"""Of the quota, while processes import and build, so that this takes no minutes."""
FALL, ENOUGH = 3.0, 1.15
_ENTER = 'for folder in {0}; do echo $$ > "$folder"/cgroup.procs || exit 125; done; exec "$@"'


class Quotas:
    """A cgroup for each rank's processor time."""

    def __init__(self, cpus: float, period_ms: float) -> None:
        self._cpus, self._period_ms = cpus, period_ms
        self._layout, self._token = cgroup_quotas.find_cgroups(), f"quota-{os.getpid()}"
        self._folders = [
            cgroup_quotas.make_node_cgroups(self._layout, self._token, rank, None) for rank in range(RANKS)
        ]

    def prefix(self, rank: int) -> list[str]:
        """Put before a command, runs it with the rank's quota."""
        folders = " ".join(f"'{folder}'" for folder in self._folders[rank])
        return ["sh", "-c", _ENTER.format(folders), "sh"]

    def hold(self, rank: int, part: float) -> None:
        """From now on the rank has that part of the quota."""
        cgroup_quotas.set_quota(self._folders[rank], self._cpus * part, period_ms=self._period_ms)

    def remove(self) -> None:
        """Once no process is left in them."""
        for folder in cgroup_quotas.lab_cgroups(self._layout, self._token):
            cgroup_quotas.remove_cgroups(folder)


@contextmanager
def quotas(cpus: float, period_ms: float) -> Iterator[Quotas]:
    """Cgroups that are removed whatever happens."""
    made = Quotas(cpus, period_ms)
    try:
        yield made
    finally:
        made.remove()


def main() -> None:
    """Both sides in turns."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was made is taken down then, too
    parser = argparse.ArgumentParser()
    parser.add_argument("turns", nargs="?", type=int, default=3)
    parser.add_argument("--batch", type=int, default=64, metavar="N", help="samples, each a microbatch")
    parser.add_argument("--cpus", type=float, default=0.4, metavar="X", help="each rank's cores at first")
    parser.add_argument("--period-ms", type=float, default=10.0, metavar="MS", help="of quotas")
    options = parser.parse_args()
    rows = []
    for _ in range(options.turns):
        with Turn(options.cpus, options.period_ms, options.batch) as turn:
            guess = turn.run(
                {rank: FALL if rank == VICTIM else 1.0 for rank in range(RANKS)}, 0, MEASURED_STEPS
            )
            known = turn.run(guess.paces(), 0, STEPS - FALL_STEP)
            dynamic = turn.run(dict.fromkeys(range(RANKS), 1.0), FALL_STEP, STEPS, dynamic=True)
        rows.append(compared(known, dynamic))
    by_name = {name: [row[name] for row in rows] for name in rows[0]}
    given = {"batch": options.batch, "cpus": options.cpus, "period_ms": options.period_ms}
    print(json.dumps({"benchmark": "elastic quota"} | given | by_name))


class Steps:
    """The figures that ranks told of one run, by step.

    Attributes:
        ends: when the last of them had ended it, in seconds.
        samples: of each rank.
        pace_s: of each rank, seconds that it took for a sample.
    """

    def __init__(self, steps: int) -> None:
        self.ends = [0.0] * steps
        self.samples = [[0] * RANKS for _ in range(steps)]
        self.pace_s = [[0.0] * RANKS for _ in range(steps)]

    def note(self, rank: int, event: dict[str, Any]) -> None:
        """A rank has ended a step."""
        step = event["step"]
        self.ends[step] = time.monotonic()
        self.samples[step][rank] = event["samples"]
        self.pace_s[step][rank] = (event["forward_s"] + event["backward_s"]) / max(1, event["samples"])

    def paces(self) -> dict[int, float]:
        """By rank, its median pace."""
        return {rank: median(paces[rank] for paces in self.pace_s[1:]) for rank in range(RANKS)}

    def took_s(self, first: int) -> list[float]:
        """Of each step from that one on."""
        return [after - before for before, after in pairwise(self.ends[first - 1 :])]


def compared(known: Steps, dynamic: Steps) -> dict[str, Any]:
    """The figures of one turn."""
    known_s = median(known.took_s(SETTLED_STEP - FALL_STEP))
    dynamic_s = median(dynamic.took_s(SETTLED_STEP))
    after = [took / known_s for took in dynamic.took_s(FALL_STEP)]
    return {
        "step_s": {"known": round(known_s, 4), "dynamic": round(dynamic_s, 4)},
        "ratio": round(dynamic_s / known_s, 3),
        "slow_steps": next((n for n, ratio in enumerate(after) if ratio <= ENOUGH), None),
        "after_fall": [round(ratio, 2) for ratio in after[:8]],
        "shares": {"known": known.samples[-1], "dynamic": dynamic.samples[-1]},
        "dealt_at": [n for n in range(1, STEPS) if dynamic.samples[n] != dynamic.samples[n - 1]],
    }


class Turn:
    """Processes with quotas, for one run after another."""

    def __init__(self, cpus: float, period_ms: float, batch: int) -> None:
        self._batch = batch
        self._driver = worker_driver()
        self._ends = ExitStack()
        self._held = self._ends.enter_context(quotas(cpus, period_ms))
        folder = self._ends.enter_context(tempfile.TemporaryDirectory())
        self._pool = self._driver.Pool(RANKS, Path(folder), self._held.prefix)
        self._ends.callback(self._pool.close)

    def __enter__(self) -> Turn:
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    def run(self, paces: dict[int, float], fall_step: int, steps: int, *, dynamic: bool = False) -> Steps:
        """One run with shares for these paces; before step ``fall_step`` the quota falls."""
        told = Steps(steps)

        def watch(_pool: Any, rank: int, event: dict[str, Any]) -> None:
            if event["event"] == "ready":
                self._held.hold(rank, 1 / FALL if rank == VICTIM and not fall_step else 1.0)
            elif event["event"] == "step":
                told.note(rank, event)
                if rank == VICTIM and event["step"] == fall_step - 1:
                    self._held.hold(VICTIM, 1 / FALL)

        for rank in range(RANKS):
            self._held.hold(rank, UNHELD)
        shares = [stop - first for first, stop in even_shares(self._batch, paces).values()]
        ranks = Ranks(shares, strike=lambda *_: None)
        given = [
            replace(order, elastic=replace(order.elastic, dynamic=dynamic))
            for order in orders(self._driver, ranks, self._batch, steps)
            if order.elastic is not None
        ]
        done = self._pool.run(given, watch)
        assert not done.errors, done.errors
        return told


if __name__ == "__main__":
    main()
