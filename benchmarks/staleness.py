"""A parameter server's staleness against its simulation: four workers, steps of 50 ms of which 10% take 500.

Layers sleep, by draws that the run and the play share; the synchronous run sums the same gradients over a
star. Prints one JSON line: by staleness, seconds a step as measured, as the play has it with the sleeps that
were drawn (``ratio``) and with what the layers took (``ratio_of_measured``), and the most that any worker was
ahead of the slowest. Run: ``python benchmarks/staleness.py [STEPS] [--real-time]``; about four minutes with
300 steps. With ``--real-time`` (root) the workers, which sleep nearly all the time, come before whatever else
runs on the machine: on a busy one sleepers wake late.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from runs.driver import worker_driver

from skyctl.schedule.seeds import splitmix64
from skyctl.schedule.stale_simulation import WorkerTimes, simulate_stale
from skyctl.workload.workload_spec import WorkloadSpec

STEPS, REAL_TIME = 300, "--real-time"
WORKERS, SEED = 4, 7
USUAL_S, STALL_S, STALLS = 0.05, 0.5, 0.1
CASES: dict[str, int | None] = {"0": 0, "1": 1, "3": 3, "10": 10, "async": None}
WORKLOAD = f"""
import random, time
import torch
from torch import nn

class Sleeps(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)
    def forward(self, x):
        time.sleep({STALL_S} if random.random() < {STALLS} else {USUAL_S})
        return self.linear(x)

def model():
    return nn.Sequential(Sleeps(), nn.Identity())

def data(batch_size, seed):
    while True:
        yield torch.ones(batch_size, 4), torch.zeros(batch_size, 2)

def loss(outputs, targets):
    return (outputs - targets).square().mean()

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.01)
"""


def main() -> None:
    """Runs every staleness in the same four processes."""
    words = [word for word in sys.argv[1:] if word != REAL_TIME]
    steps = int(words[0]) if words else STEPS
    driver = worker_driver()
    driver.RUN_S = 300.0  # processes that import torch on a busy machine
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.py"
        path.write_text(WORKLOAD)
        spec = WorkloadSpec(source=str(path), path=str(path), batch_size=WORKERS, seed=SEED).to_dict()
        pool = driver.Pool(WORKERS, Path(folder))
        try:
            if REAL_TIME in sys.argv:
                _case(driver, pool, spec, 2, 0)  # so that all that is slow to begin has begun
                _come_first(process.popen.pid for process in pool.processes)
            found = {name: _case(driver, pool, spec, steps, most) for name, most in CASES.items()}
        finally:
            pool.close()
    gain = found["0"]["step_s"] / found["3"]["step_s"]
    print(
        json.dumps({"steps": steps, "workers": WORKERS, "by_staleness": found, "gain_of_3": round(gain, 3)})
    )


def _come_first(pids: Iterable[int]) -> None:
    """Gives all threads of these processes, and those that they will start, the least real-time priority."""
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setscheduler(int(thread.name), os.SCHED_RR, os.sched_param(1))


def drawn_s(steps: int) -> list[list[float]]:
    """By worker and step, what its layer sleeps: the layer's own draw, seeded as the worker seeds it."""
    found = []
    for worker in range(WORKERS):
        draws = (random.Random(splitmix64(SEED, step, worker, 0)).random() for step in range(steps))
        found.append([STALL_S if draw < STALLS else USUAL_S for draw in draws])
    return found


def _case(driver: Any, pool: Any, spec: dict[str, Any], steps: int, most: int | None) -> dict[str, Any]:
    others = range(1, WORKERS)
    star = [(1.0, 0, [(rank, 0) for rank in others], [(0, rank) for rank in others])]
    sync = {} if most == 0 else {"staleness": {"most": most}}
    done = pool.run(driver.side_by_side(spec, 2, [1] * WORKERS, star, steps, sync=sync))
    if done.errors:
        raise SystemExit(f"staleness {most}: {done.errors}")
    events = [done.steps[rank] for rank in range(WORKERS)]
    took = [[event["forward_s"] + event["backward_s"] for event in own] for own in events]
    step_s = max(sum(event["iteration_s"] for event in own) for own in events) / steps
    played, replayed = (_played_s(each, most) for each in (drawn_s(steps), took))
    ahead = [event["ahead"] for own in events for event in own if "ahead" in event]
    return {
        "step_s": round(step_s, 4),
        "played_s": round(played, 4),
        "ratio": round(step_s / played, 3),
        "ratio_of_measured": round(step_s / replayed, 3),
        "most_ahead": max(ahead, default=0),
    }


def _played_s(compute_s: list[list[float]], most: int | None) -> float:
    play = simulate_stale([WorkerTimes(each) for each in compute_s], most)
    return play.run_s / len(compute_s[0])


if __name__ == "__main__":
    main()
