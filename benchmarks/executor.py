"""The executor against the simulator: a step's time with layers that sleep a known time, and no link shaping.

Prints one JSON line a case. ``ratio``: measured ÷ simulated, with the times the layers were told to take;
``ratio_of_measured``: the same with the times they did take (a sleep overshoots), so what remains is the
executor's own part: messages, Python, waking up. ``overhead_s``: what a rank does in a step beside its layers
and waiting. Run: ``python benchmarks/executor.py``.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from skyctl.schedule.actions import in_flight
from skyctl.schedule.simulate import FREE, Boundary, StageTimes, simulate
from skyctl.workload.spec import WorkloadSpec

WORKLOAD = """
import time
import torch
from torch import nn

class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, forward_s, backward_s, real):
        ctx.seconds = backward_s if real else 0.0
        if real:
            time.sleep(forward_s)
        return x * weight
    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, gradient.sum(), None, None, None

class Layer(nn.Module):
    def __init__(self, forward_s, backward_s):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.seconds = forward_s, backward_s
    def forward(self, x):
        return Sleep.apply(x, self.weight, *self.seconds, not hasattr(x, "fake_mode"))

def model():
    return [Layer(f, b) for f, b in TIMES]

def data(batch_size, seed):
    while True:
        yield torch.ones(batch_size, WIDTH), torch.zeros(batch_size)

def loss(outputs, targets):
    return (outputs.mean(1) - targets).square().mean()

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.0)
"""
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
    driver = _driver()
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
    path.write_text(WORKLOAD.replace("TIMES", repr(times)).replace("WIDTH", str(WIDTH)))
    spec = WorkloadSpec(source=str(path), path=str(path), batch_size=microbatches).to_dict()
    cuts = list(range(len(times) + 1))
    outcome = pool.run(driver.payloads(spec, cuts, microbatches, schedule, STEPS))
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
    depths = [in_flight(schedule, s, len(stages), microbatches) for s in range(len(stages))]
    boundaries = [Boundary(FREE, FREE)] * (len(stages) - 1)
    return simulate(schedule, microbatches, depths, stages, boundaries).iteration_s


def _driver() -> Any:
    """The tests' way to play the launcher."""
    path = Path(__file__).parent.parent / "tests" / "worker" / "driver.py"
    spec = importlib.util.spec_from_file_location("worker_driver", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["worker_driver"] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
