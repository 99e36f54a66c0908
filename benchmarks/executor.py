"""The executor against the simulator: a step's time with layers that sleep a known time, and no link shaping.

Prints one JSON line a case. ``ratio``: measured ÷ simulated, with the times the layers were told to take;
``ratio_of_measured``: the same with the times they did take (a sleep overshoots), so what remains is the
executor's own part: messages, Python, waking up. ``overhead_s``: what a rank does in a step beside its layers
and waiting. Run: ``python benchmarks/executor.py``.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from runs.driver import sleeping_workload, worker_driver

from skyctl.schedule.actions import least_in_flight
from skyctl.schedule.simulation import simulate
from skyctl.schedule.step_times import FREE_MESSAGE, BoundaryTimes, StageTimes
from skyctl.workload.workload_spec import WorkloadSpec

STEPS = 8
CASES: list[tuple[str, list[tuple[float, float]], int, str]] = [
    ("three equal stages", [(0.010, 0.010)] * 3, 8, "1f1b"),
    ("three equal stages", [(0.010, 0.010)] * 3, 8, "gpipe"),
    ("three equal stages", [(0.010, 0.010)] * 3, 8, "sequential"),
    ("three unequal stages", [(0.005, 0.010), (0.010, 0.020), (0.003, 0.006)], 16, "1f1b"),
]
WIDTH = 16384  # float32: 64 KiB a message


def main() -> None:
    """Runs every case in the same three processes."""
    driver = worker_driver()
    with tempfile.TemporaryDirectory() as folder:
        pool = driver.Pool(3, Path(folder))
        try:
            for name, times, microbatches, schedule in CASES:
                print(
                    json.dumps(_case(driver, pool, Path(folder), name, times, microbatches, schedule)),
                    flush=True,
                )
        finally:
            pool.close()


def _case(
    driver: Any,
    pool: Any,
    folder: Path,
    name: str,
    times: list[tuple[float, float]],
    microbatches: int,
    schedule: str,
) -> dict[str, Any]:
    path = folder / "train.py"
    sleeping_workload(path, times, WIDTH)
    spec = WorkloadSpec(source=str(path), path=str(path), batch_size=microbatches).to_dict()
    cuts = list(range(len(times) + 1))
    outcome = pool.run(driver.orders(spec, cuts, microbatches, schedule, STEPS))
    if outcome.errors:
        raise SystemExit(f"{name}: {outcome.errors}")

    def figure(rank: int, key: str) -> float:
        return median(float(event[key]) for event in outcome.steps[rank][2:])

    ranks = range(len(times))
    measured = figure(0, "iteration_s")
    told = _simulated(schedule, microbatches, [StageTimes(f, b) for f, b in times])
    took = _simulated(
        schedule,
        microbatches,
        [
            StageTimes(
                figure(r, "forward_s") / microbatches,
                figure(r, "backward_s") / microbatches,
                figure(r, "optimizer_s"),
            )
            for r in ranks
        ],
    )
    overhead = [
        figure(r, "compute_s") - sum(figure(r, f"{key}_s") for key in ("forward", "backward", "optimizer"))
        for r in ranks
    ]
    return {
        "benchmark": "executor",
        "case": name,
        "schedule": schedule,
        "microbatches": microbatches,
        "measured_s": round(measured, 5),
        "simulated_s": round(told, 5),
        "ratio": round(measured / told, 4),
        "ratio_of_measured": round(measured / took, 4),
        "overhead_s": [round(seconds, 5) for seconds in overhead],
    }


def _simulated(schedule: str, microbatches: int, stages: list[StageTimes]) -> float:
    depths = [least_in_flight(schedule, s, len(stages), microbatches) for s in range(len(stages))]
    boundaries = [BoundaryTimes(FREE_MESSAGE, FREE_MESSAGE)] * (len(stages) - 1)
    return simulate(schedule, microbatches, depths, stages, boundaries).iteration_s


if __name__ == "__main__":
    main()
