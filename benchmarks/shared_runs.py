"""Runs that take turns on the same devices: their steps as predicted and as measured, over eight mixes.

Real ranks, whose layers sleep: a device is busy for as long as a layer is to take, whatever else this machine
does. The time that a step alone takes beside its layers is a gap at its end. Prints one JSON line. By mix and
run, ``measured`` over ``predicted``: medians of the steps that end while all of its runs are under way.
``off``: how far from 1 these are, the median and the worst.

    python benchmarks/shared_runs.py [--steps 60] [--only NAME]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from runs.driver import sleeping_workload, worker_driver

from skyctl.schedule.actions import least_in_flight
from skyctl.schedule.simulation_input import SimulationInput
from skyctl.schedule.step_times import BoundaryTimes, StageTimes
from skyctl.turns.turn_simulation import PlacedPipeline, SharedRun, shared_step_s
from skyctl.worker.rank_order import TurnsOrder
from skyctl.workload.workload_spec import WorkloadSpec

ALONE_STEPS = 15


@dataclass(frozen=True)
class Part:
    """A run of a mix: a pipeline with one layer on each of its devices.

    Attributes:
        times: of each layer, seconds forward and backward.
    """

    devices: str
    times: tuple[tuple[float, float], ...]
    microbatches: int = 2
    schedule: str = "1f1b"
    steps: float = 1.0
    priority: int = 0


MIXES: dict[str, tuple[str, tuple[Part, ...]]] = {
    "two alike": ("fair", (Part("a", ((0.03, 0.05),)), Part("a", ((0.03, 0.05),)))),
    "unequal actions": ("fair", (Part("a", ((0.02, 0.03),)), Part("a", ((0.06, 0.12),), steps=0.4))),
    "three alike": ("fair", (Part("a", ((0.02, 0.04),)),) * 3),
    "same order": ("fair", (Part("ab", ((0.03, 0.05),) * 2, 4), Part("ab", ((0.03, 0.05),) * 2, 4))),
    "opposite order": ("fair", (Part("abc", ((0.03, 0.05),) * 3, 3), Part("cba", ((0.03, 0.05),) * 3, 3))),
    "a pipeline and one": ("fair", (Part("ab", ((0.03, 0.05),) * 2, 2), Part("b", ((0.04, 0.06),), 4))),
    "sequential bubbles": (
        "fair",
        (Part("ab", ((0.03, 0.06),) * 2, 2, "sequential"), Part("ba", ((0.03, 0.06),) * 2, 2, "sequential")),
    ),
    "one before the other": (
        "priority",
        (Part("ab", ((0.02, 0.05), (0.04, 0.06)), 3, priority=1), Part("ba", ((0.03, 0.05),) * 2, 3)),
    ),
}


def main() -> None:
    """Plays the mixes one after the other."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--only", choices=MIXES)
    given = parser.parse_args()
    rows: dict[str, list[float]] = {}
    for name, (policy, parts) in MIXES.items():
        if given.only in (None, name):
            steps = [round(given.steps * part.steps) for part in parts]
            alone = {part: gap_s(part) for part in set(parts)}
            predicted = shared_step_s(
                [predicted_run(part, n, alone[part]) for part, n in zip(parts, steps, strict=True)], policy
            )
            measured = played(policy, parts, steps)
            rows[name] = [round(m / p, 3) for m, p in zip(measured, predicted, strict=True)]
    off = [abs(ratio - 1) for ratios in rows.values() for ratio in ratios]
    found = {"median": round(median(off), 3), "worst": round(max(off), 3)}
    print(json.dumps({"benchmark": "shared_runs", "off": found, "measured_over_predicted": rows}))


def gap_s(part: Part) -> float:
    """Seconds of a step in which no layer runs, as a run alone shows them: data, an update, reports."""
    [measured_s], [ideal_s] = (
        played("fair", [part], [ALONE_STEPS]),
        shared_step_s([predicted_run(part, 2)], "fair"),
    )
    return max(0.0, measured_s - ideal_s)


def predicted_run(part: Part, steps: int, gap_s: float = 0.0) -> SharedRun:
    """The run that is simulated; messages between processes of one machine are free."""
    count = len(part.devices)
    given = SimulationInput(
        part.schedule,
        part.microbatches,
        tuple(least_in_flight(part.schedule, s, count, part.microbatches) for s in range(count)),
        (0,) * count,
        tuple(StageTimes(*times) for times in part.times),
        (BoundaryTimes(),) * (count - 1),
    )
    return SharedRun((PlacedPipeline(given, tuple(part.devices)),), steps, gap_s, part.priority)


def played(policy: str, parts: Sequence[Part], steps: Sequence[int]) -> list[float]:
    """By run, the median seconds of its steps while all are under way."""
    driver = worker_driver()
    ends: list[list[float]] = [[] for _ in parts]
    failures: list[BaseException] = []
    gate = threading.Barrier(len(parts))

    def play(number: int, pool: Any, orders: Sequence[Any]) -> None:
        def watch(_pool: Any, rank: int, event: dict[str, Any]) -> None:
            if event["event"] == "ready" and rank == len(orders) - 1:
                gate.wait()
            if event["event"] == "step" and rank == 0:
                ends[number].append(time.monotonic())

        try:
            done = pool.run(orders, watch)
            assert not done.errors, done.errors
        except BaseException as exc:  # noqa: BLE001 — raised where all have ended
            failures.append(exc)
            gate.abort()

    with tempfile.TemporaryDirectory() as name:
        pools = [driver.Pool(len(part.devices), Path(name)) for part in parts]
        try:
            threads = [
                threading.Thread(
                    target=play,
                    args=(number, pool, orders(driver, Path(name) / str(number), policy, part, count)),
                )
                for number, (pool, part, count) in enumerate(zip(pools, parts, steps, strict=True))
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            for pool in pools:
                pool.close()
    if failures:
        raise failures[0]
    first, last = max(of_run[1] for of_run in ends), min(of_run[-1] for of_run in ends)
    return [
        median(after - before for before, after in pairwise(of_run) if before >= first and after <= last)
        for of_run in ends
    ]


def orders(driver: Any, folder: Path, policy: str, part: Part, steps: int) -> list[Any]:
    """The orders of one run's ranks, which take turns."""
    folder.mkdir()
    sleeping_workload(folder / "train.py", part.times, 8)
    path = str(folder / "train.py")
    spec = WorkloadSpec(source=path, path=path, batch_size=part.microbatches, seed=0).to_dict()
    cuts = list(range(len(part.devices) + 1))
    made = driver.orders(spec, cuts, part.microbatches, part.schedule, steps)
    turns = f"priority={part.priority}" if policy == "priority" else policy
    return [
        replace(order, run_id=folder.name, turns=TurnsOrder(turns, device))
        for order, device in zip(made, part.devices, strict=True)
    ]


if __name__ == "__main__":
    main()
