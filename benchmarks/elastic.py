"""One of four unequal replicas is lost at a random moment of a step: when does the next update come?

Prints one JSON line. ``next_update_s``: from the loss to the end of the step under way, or of the next one
where that had ended. ``pause_s``: the longest time without an update from the loss on; ``limit_s``: two
undisturbed steps and a second. ``equal``: runs whose weights have the bits of the undisturbed run's.
``within``: those that are equal, with a pause within the limit. ``stalled``: those in which the others did
not go on at all.

    python benchmarks/elastic.py [RUNS]             # the process is killed
    python benchmarks/elastic.py [RUNS] --freeze    # it is stopped for 20 s
    python benchmarks/elastic.py [RUNS] --cut       # its link passes nothing any more; needs root
    python benchmarks/elastic.py [RUNS] --pair      # there are two replicas, and this process is the witness
    python benchmarks/elastic.py [RUNS] --stage     # it is one of two pipelines' stages, and is killed
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from runs.driver import worker_driver
from surviving import lab

from skyctl.checkpoint.node import safetensors
from skyctl.worker.rank_order import ElasticOrder, RankOrder, RouteTree
from skyctl.workload.workload_spec import WorkloadSpec

MODEL, LAYERS, BATCH = "gpt:layers=2,hidden=64,heads=4,context=64", 6, 16
SHARES, PAIR = (2, 6, 4, 4), (6, 10)
CUTS = [0, 3, LAYERS]
"""Of pipelines of two stages."""
STEPS_AFTER, FREEZE_S = 12, 20.0
START_S, STALL_S = 300.0, 45.0
"""How long nobody may say a word, before the first step and from it on."""
STRIKE_STEP = 24
"""So late that ranks know which silence of others is usual: eight signs of life, one each 0.1 s."""
LOCALHOST = "127.0.0.1"


@dataclass(frozen=True)
class Ranks:
    """The ranks of a run: where they run, and how one is lost.

    Attributes:
        shares: microbatches of each; with stages those of each pipeline.
        strike: called with the processes and a rank; that is lost from then on, or for a while.
        heal: called with the same once the others have ended; the rank ends then, too.
        addresses: of each.
        prefix: by number, what to put before a process's command.
        cuts: where the stages of a pipeline begin and end.
    """

    shares: Sequence[int]
    strike: Callable[[Any, int], None]
    heal: Callable[[Any, int], None] = lambda _pool, _rank: None
    addresses: Sequence[str] = (LOCALHOST,) * len(SHARES)
    prefix: Callable[[int], Sequence[str]] = lambda _number: ()
    cuts: Sequence[int] = (0, LAYERS)

    @property
    def count(self) -> int:
        """Of all pipelines."""
        return len(self.shares) * (len(self.cuts) - 1)

    def leaving(self, victim: int) -> set[int]:
        """The ranks of the pipeline that loses one."""
        stages = len(self.cuts) - 1
        return {victim - victim % stages + stage for stage in range(stages)}


def main() -> None:
    """Loses one rank in each run."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was made is taken down then, too
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", nargs="?", type=int, default=40)
    ways = parser.add_mutually_exclusive_group()
    for way in ("freeze", "cut", "pair", "stage"):
        ways.add_argument(f"--{way}", dest="way", action="store_const", const=way, default="kill")
    parser.add_argument("--step", type=int, default=STRIKE_STEP, metavar="N", help="after which it is lost")
    options = parser.parse_args()
    with ranks_for(options.way) as ranks:
        row = {"benchmark": "elastic", "way": options.way, "step": options.step}
        print(json.dumps(row | measure(ranks, options.runs, options.step)))


def measure(ranks: Ranks, runs: int, step: int) -> dict[str, Any]:
    """The figures of so many runs, after one that nothing happens to.

    Args:
        step: after whose end a rank is lost, within about one step's time.
    """
    calm = played(ranks, None, step, 0.0)
    assert calm is not None, "the undisturbed run has stalled"
    expected, ends = calm
    step_s = median(after - before for before, after in pairwise(list(ends.values())[3:]))
    limit_s = 2 * step_s + 1.0
    gaps, pauses, equal, within = [], [], 0, 0
    for run in range(runs):
        draw = random.Random(run)
        victim = draw.randrange(ranks.count)
        struck = played(ranks, victim, step, draw.random() * step_s)
        if struck is None:
            continue
        weights, ends = struck
        gaps.append(min(at for at in ends.values() if at > 0))
        pauses.append(longest_pause(ends.values()))
        is_equal = all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
        equal += is_equal
        within += is_equal and pauses[-1] <= limit_s
    return {
        "runs": runs,
        "step_s": round(step_s, 4),
        "limit_s": round(limit_s, 4),
        "next_update_s": _median_and_max(gaps),
        "pause_s": _median_and_max(pauses),
        "stalled": runs - len(gaps),
        "equal": equal,
        "within": within,
    }


def longest_pause(ends: Iterable[float]) -> float:
    """The longest time without the end of a step from time 0 on."""
    after = [0.0, *sorted(at for at in ends if at > 0)]
    return max((later - at for at, later in pairwise(after)), default=0.0)


def _median_and_max(seconds: Sequence[float]) -> dict[str, float] | None:
    return {"median": round(median(seconds), 4), "max": round(max(seconds), 4)} if seconds else None


@contextmanager
def ranks_for(way: str) -> Iterator[Ranks]:
    """Ranks that are lost in that way; what they need is taken down whatever happens."""
    if way == "cut":
        with tempfile.TemporaryDirectory() as folder, lab.lab_of(_SPEC, "elastic", folder) as state:
            faults = lab.of_tests("lab.fault_injection")
            names = [node.name for node in state.nodes]

            def heal(pool: Any, rank: int) -> None:
                _kill(pool, rank)  # it may wait in a sum for good, and is none of the others
                faults.reconnect(state, names[rank])

            yield Ranks(
                SHARES,
                strike=lambda _pool, rank: faults.disconnect(state, names[rank]),
                heal=heal,
                addresses=[node.address for node in state.nodes],
                prefix=lambda number: ["nsenter", "-t", str(state.nodes[number].process.pid), "-n", "--"],
            )
    elif way == "freeze":
        yield Ranks(SHARES, _freeze)
    elif way == "stage":
        yield Ranks(PAIR, _kill, cuts=CUTS)
    else:
        yield Ranks(PAIR if way == "pair" else SHARES, _kill)


_SPEC = {"nodes": [{"name": f"n{rank}", "cpus": 1} for rank in range(len(SHARES))]}
"""The processes use its network alone."""


def _kill(pool: Any, rank: int) -> None:
    pool.processes[rank].popen.send_signal(signal.SIGKILL)


def _freeze(pool: Any, rank: int) -> None:
    process = pool.processes[rank].popen
    process.send_signal(signal.SIGSTOP)
    time.sleep(FREEZE_S)
    process.send_signal(signal.SIGCONT)


def played(
    ranks: Ranks, victim: int | None, strike_step: int, delay_s: float
) -> tuple[dict[str, torch.Tensor], dict[int, float]] | None:
    """One run: its weights, and by step when its last member ended it, in seconds since the strike.

    None: nobody got any further.

    Args:
        victim: the rank that is lost; None: none is.
        strike_step: after whose end that happens.
        delay_s: from there to that.
    """
    driver = worker_driver()
    ends: dict[int, float] = {}
    ended: set[int] = set()
    leaving = set() if victim is None else ranks.leaving(victim)
    struck_at = 0.0
    timer: threading.Timer | None = None

    def strike(pool: Any) -> None:
        nonlocal struck_at
        assert victim is not None
        struck_at = time.monotonic()
        ranks.strike(pool, victim)

    def watch(pool: Any, rank: int, event: dict[str, Any]) -> None:
        nonlocal timer
        if event["event"] == "result":
            ended.add(rank)
            if victim is not None and ended == set(range(ranks.count)) - leaving:
                ranks.heal(pool, victim)
        if event["event"] != "step" or (rank in leaving and struck_at):
            return
        if victim is not None and event["step"] == strike_step and timer is None:
            timer = threading.Timer(delay_s, strike, (pool,))
            timer.start()
        ends[event["step"]] = time.monotonic()
        pool.stall_s = STALL_S

    with tempfile.TemporaryDirectory() as folder:
        pool = driver.Pool(ranks.count, Path(folder), ranks.prefix)
        pool.stall_s = START_S
        try:
            try:
                done = pool.run(orders(driver, ranks, BATCH, strike_step + STEPS_AFTER), watch)
            except AssertionError as exc:
                print(exc, file=sys.stderr, flush=True)
                return None
            weights: dict[str, torch.Tensor] = {}
            for rank in sorted(set(done.results) - leaving):
                weights |= safetensors.load(Path(done.results[rank]["weights"]))
        finally:
            if timer is not None:
                timer.join()
            pool.close()
    return weights, {step: at - struck_at for step, at in ends.items()}


def orders(driver: Any, ranks: Ranks, batch: int, steps: int) -> list[RankOrder]:
    """Ranks that may leave: they hold all layers and sum around a ring, or are stages of pipelines."""
    spec = WorkloadSpec(source=MODEL, batch_size=batch, seed=3).to_dict()
    if len(ranks.cuts) > 2:
        side_by_side = lab.of_tests("worker.elastic_pipelines").pipelines
        return list(side_by_side(driver, spec, list(ranks.cuts), ranks.shares, steps, "fixed32"))
    count = len(ranks.shares)
    routes = [(1 / count, root, *_around(root, count)) for root in range(count)]
    sums = {"format": "fixed32", "chunk_bytes": 65536}
    plain = driver.side_by_side(spec, LAYERS, ranks.shares, routes, steps, sync=sums)
    shares = {rank: order.microbatch_range for rank, order in enumerate(plain)}
    alone, trees = {rank: rank for rank in shares}, {0: tuple(RouteTree(*route) for route in routes)}
    elastic = ElasticOrder(alone, shares, trees, witness=count % 2 == 0)
    return [
        replace(
            order,
            elastic=elastic,
            weights=True,
            world=replace(
                order.world, hosts={r: ranks.addresses[r] for r in shares if r != order.world.rank}
            ),
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
