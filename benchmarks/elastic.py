"""One of four unequal replicas is lost at a random moment of a step: when does the next update come?

Prints one JSON line. ``next_update_s``: from the kill to the end of the step under way, or of the next one
where that had ended; ``limit_s``: two undisturbed steps and a second. ``equal``: runs whose weights have the
bits of the undisturbed run's. ``within``: those that are equal and within the limit.
Run: ``python benchmarks/elastic.py [RUNS] [--freeze]``; ``--freeze`` stops the process for 20 s instead.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import tempfile
import threading
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from runs.driver import worker_driver

from skyctl.checkpoint.node import safetensors
from skyctl.worker.rank_order import ElasticOrder, RankOrder, RouteTree
from skyctl.workload.workload_spec import WorkloadSpec

MODEL, LAYERS, BATCH = "gpt:layers=2,hidden=64,heads=4,context=64", 6, 16
SHARES = [2, 6, 4, 4]
STEPS, KILL_STEP, FREEZE_S = 16, 5, 20.0


def main() -> None:
    """Kills, or stops, one rank in each run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", nargs="?", type=int, default=40)
    parser.add_argument("--freeze", action="store_true")
    options = parser.parse_args()
    expected, ends = played(None, 0.0, 0)
    step_s = median(ends[step + 1] - ends[step] for step in range(3, STEPS - 1))
    limit_s = 2 * step_s + 1.0
    gaps, equal, within = [], 0, 0
    for run in range(options.runs):
        draw = random.Random(run)
        victim = draw.randrange(len(SHARES))
        struck = played(victim, draw.random() * step_s, FREEZE_S if options.freeze else 0.0)
        weights, ends = struck
        gaps.append(min(ended for ended in ends.values() if ended > 0))
        is_equal = all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
        equal += is_equal
        within += is_equal and gaps[-1] <= limit_s
    print(
        json.dumps(
            {
                "benchmark": "elastic",
                "freeze": options.freeze,
                "runs": options.runs,
                "step_s": round(step_s, 4),
                "limit_s": round(limit_s, 4),
                "next_update_s": {"median": round(median(gaps), 4), "max": round(max(gaps), 4)},
                "equal": equal,
                "within": within,
            }
        )
    )


def played(
    victim: int | None, delay_s: float, freeze_s: float
) -> tuple[dict[str, torch.Tensor], dict[int, float]]:
    """One run: its weights, and by step when its last member ended it, in seconds since the strike.

    Args:
        victim: the rank that is lost; None: none is.
        delay_s: from the end of a step to that.
        freeze_s: it is stopped for so long; 0: it is killed.
    """
    driver = worker_driver()
    ends: dict[int, float] = {}
    struck_at = 0.0

    def strike(pool: Any) -> None:
        nonlocal struck_at
        process = pool.processes[victim].popen
        struck_at = time.monotonic()
        process.send_signal(signal.SIGSTOP if freeze_s else signal.SIGKILL)
        if freeze_s:
            time.sleep(freeze_s)
            process.send_signal(signal.SIGCONT)

    def watch(pool: Any, rank: int, event: dict[str, Any]) -> None:
        if event["event"] != "step" or (rank == victim and struck_at):
            return
        if victim is not None and event["step"] == KILL_STEP and KILL_STEP not in ends:
            threading.Timer(delay_s, strike, (pool,)).start()
        ends[event["step"]] = time.monotonic()

    with tempfile.TemporaryDirectory() as folder:
        pool = driver.Pool(len(SHARES), Path(folder))
        try:
            done = pool.run(orders(driver), watch)
            first = min(rank for rank in done.results if rank != victim)
            weights = safetensors.load(Path(done.results[first]["weights"]))
        finally:
            pool.close()
    return weights, {step: ended - struck_at for step, ended in ends.items()}


def orders(driver: Any) -> list[RankOrder]:
    """Ranks that hold all layers, sum around a ring, and may leave."""
    count = len(SHARES)
    routes = [(1 / count, root, *_around(root, count)) for root in range(count)]
    spec = WorkloadSpec(source=MODEL, batch_size=BATCH, seed=3).to_dict()
    sums = {"format": "fixed32", "chunk_bytes": 65536}
    plain = driver.side_by_side(spec, LAYERS, SHARES, routes, STEPS, sync=sums)
    shares = {rank: order.microbatch_range for rank, order in enumerate(plain)}
    alone = {rank: rank for rank in shares}
    elastic = ElasticOrder(alone, shares, {0: tuple(RouteTree(*route) for route in routes)})
    return [
        replace(
            order,
            elastic=elastic,
            weights=True,
            world=replace(order.world, hosts={r: "127.0.0.1" for r in shares if r != order.world.rank}),
        )
        for order in plain
    ]


def _around(root: int, count: int) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
    """Up and down of the route that begins behind its root and goes round."""
    path = [(root + 1 + place) % count for place in range(count)]
    down = [root, *path[:-1]]
    return tuple(pairwise(path)), tuple(pairwise(down))


if __name__ == "__main__":
    main()
