"""Four unequal machines come and go while a run is under way: what of their work is used, and what is lost?

A machine leaves (its process is killed) or comes (a new process joins) every few seconds, drawn by seed; two
are there at least. Layers sleep, so that machines are as fast as they are to be whatever else this one does.

Prints one JSON line. ``samples_ratio``: samples a second, of those that the machines that were there would
have made together, each at the pace that it had undisturbed; a machine is there from when it asks to be let
in until it is killed.
``equal``: whether the weights have the bits of an undisturbed run. ``memory_growth``: of the rank that was
there longest, its memory in the last quarter of the steps over that in the second.
Run: ``python benchmarks/elastic_churn.py [--steps 300] [--every 10] [--seed 1] [--soak KILLS --state FILE]``;
``--soak`` plays runs until so many were killed, one line of JSON in FILE for each, and goes on from there.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from runs.driver import worker_driver

from skyctl.checkpoint.node import safetensors
from skyctl.worker.rank_order import ElasticOrder, JoinOrder, RankOrder, RoutePlace, RouteTree
from skyctl.workload.workload_spec import WorkloadSpec

PACES_S = [0.010, 0.014, 0.020, 0.030]
"""By machine, seconds for the forward of a microbatch of one sample; the backward takes next to nothing."""
BATCH = 64
SHARES = [25, 18, 13, 8]
LEAST_THERE = 2
SOURCE = """
import json, time
from pathlib import Path

import torch
from torch import nn
import torch.distributed as dist


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        time.sleep(json.loads(Path(__file__).with_name("paces.json").read_text())[str(dist.get_rank())])
        return x + torch.tanh(self.linear(x))


def model():
    return [Layer(), nn.Linear(64, 10)]


def data(batch_size, seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(batch_size, 64, generator=generator), torch.zeros(batch_size, dtype=torch.int64)
"""


@dataclass
class Churn:
    """The machines that are there, and what happens next; called with each event of the run."""

    draw: random.Random
    every_s: float
    folder: Path
    orders: list[RankOrder]
    machines: dict[int, int] = field(default_factory=dict)
    began: dict[int, float] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)
    kills: int = 0
    joins: int = 0
    next_s: float = 0.0
    first_step: float = 0.0
    steps_at: list[float] = field(default_factory=list)

    def __call__(self, pool: Any, _rank: int, event: dict[str, Any]) -> None:
        if event["event"] != "step":
            return
        now = time.monotonic()
        if not self.first_step:
            self.first_step, self.next_s = now, now + self.every_s
            self.machines = {number: number for number in range(len(PACES_S))}
            self.began = dict.fromkeys(self.machines, now)
        if event["step"] >= len(self.steps_at):
            self.steps_at.append(now)
        if self.every_s and now >= self.next_s and event["step"] + 20 < self.orders[0].steps:
            self.next_s += self.every_s
            self._change(pool, now)

    def _change(self, pool: Any, now: float) -> None:
        there = [rank for rank in self.machines if rank not in self.ended]
        members = {number for events in pool.outcome.members.values() for number in events[-1]["members"]}
        settled = [rank for rank in there if rank < len(PACES_S) or rank in members]
        away = sorted(set(range(len(PACES_S))) - {self.machines[rank] for rank in there})
        if away and (len(settled) <= LEAST_THERE or self.draw.random() < 0.5):
            self._come(pool, self.draw.choice(away), settled, now)
        elif len(settled) > LEAST_THERE:
            victim = self.draw.choice(settled)
            pool.processes[victim].popen.send_signal(signal.SIGKILL)
            self.ended[victim] = now
            self.kills += 1

    def _come(self, pool: Any, machine: int, members: list[int], now: float) -> None:
        rank = len(pool.processes) - 1
        pool.add()  # the next one is to be ready when it is wanted
        self.machines[rank], self.began[rank] = machine, now
        paces = {number: PACES_S[at] for number, at in self.machines.items()}
        fresh = self.folder / "fresh.json"  # ranks read while it is written
        fresh.write_text(json.dumps(paces))
        fresh.replace(self.folder / "paces.json")
        self.joins += 1
        pool.admit(joining(self.orders[0], rank, members, self.folder / f"given-{rank}", PACES_S[machine]))


def main() -> None:
    """One run with churn beside one without, or a soak."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--soak", type=int, default=0)
    parser.add_argument("--state", type=Path)
    options = parser.parse_args()
    calm, (undisturbed, told) = played(options.steps, 0.0, 0)
    paces = [
        median((event["forward_s"] + event["backward_s"]) / event["samples"] for event in told.steps[rank])
        for rank in range(len(PACES_S))
    ]
    if not options.soak:
        found = measured(options.steps, options.every, options.seed, calm, paces)
        calm_ratio = round(used_part(undisturbed, paces), 4)
        print(json.dumps({"benchmark": "elastic_churn", "undisturbed_ratio": calm_ratio, **found}))
        return
    assert options.state is not None, "--soak goes with --state FILE"
    lines = options.state.read_text().splitlines() if options.state.exists() else []
    done = [json.loads(line) for line in lines]
    while sum(run["kills"] for run in done) < options.soak:
        done.append(measured(options.steps, options.every, options.seed + len(done), calm, paces))
        with options.state.open("a") as file:
            file.write(json.dumps(done[-1]) + "\n")
    print(
        json.dumps(
            {
                "benchmark": "elastic_churn",
                "kills": sum(run["kills"] for run in done),
                "joins": sum(run["joins"] for run in done),
                "runs": len(done),
                "equal": sum(run["equal"] for run in done),
                "samples_ratio": median(run["samples_ratio"] for run in done),
                "memory_growth": max(run["memory_growth"] for run in done),
            }
        )
    )


def measured(
    steps: int, every_s: float, seed: int, calm: dict[str, torch.Tensor], paces: list[float]
) -> dict[str, Any]:
    """A run with churn, compared with the weights of the calm one."""
    weights, (churn, outcome) = played(steps, every_s, seed)
    longest = max(outcome.steps.values(), key=len)
    memory = [event["peak_memory_bytes"] or 0 for event in longest]
    quarter = len(memory) // 4
    gaps = [after - before for before, after in zip(churn.steps_at, churn.steps_at[1:], strict=False)]
    return {
        "seed": seed,
        "steps": len(churn.steps_at),
        "kills": churn.kills,
        "joins": churn.joins,
        "entered": sum(rank >= len(PACES_S) and bool(told) for rank, told in outcome.steps.items()),
        "samples_ratio": round(used_part(churn, paces), 4),
        "longest_step_s": round(max(gaps), 3),
        "median_step_s": round(median(gaps), 3),
        "equal": all(torch.equal(weights[name], tensor) for name, tensor in calm.items()),
        "memory_growth": round(median(memory[-quarter:]) / median(memory[quarter : 2 * quarter]), 4),
    }


def used_part(churn: Churn, paces: list[float]) -> float:
    """The samples that the run was trained on, over those that its machines could have computed.

    Args:
        paces: by machine, seconds for a sample.
    """
    end = churn.steps_at[-1]
    able = sum(
        (min(churn.ended.get(rank, end), end) - began) / paces[churn.machines[rank]]
        for rank, began in churn.began.items()
    )
    return (len(churn.steps_at) - 1) * BATCH / able


def played(steps: int, every_s: float, seed: int) -> tuple[dict[str, torch.Tensor], tuple[Churn, Any]]:
    """One run: its weights, and what happened in it; ``every_s``: 0: nothing does."""
    driver = worker_driver()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        orders = first_orders(driver, folder, steps)
        churn = Churn(random.Random(seed), every_s, folder, orders)
        pool = driver.Pool(len(PACES_S), folder)
        pool.stall_s = 120.0
        pool.add()
        try:
            done = pool.run(orders, churn)
            left = [rank for rank, result in done.results.items() if rank not in churn.ended]
            assert left, done.errors
            weights = safetensors.load(Path(done.results[left[0]]["weights"]))
        finally:
            pool.close()
    return weights, (churn, done)


def first_orders(driver: Any, folder: Path, steps: int) -> list[RankOrder]:
    """Ranks that hold all layers, sum at the first one, and may leave."""
    (folder / "train.py").write_text(SOURCE)
    (folder / "paces.json").write_text(json.dumps(dict(enumerate(PACES_S))))
    path = str(folder / "train.py")
    spec = WorkloadSpec(source=path, path=path, batch_size=BATCH, seed=3).to_dict()
    others = range(1, len(SHARES))
    routes = [(1.0, 0, [(rank, 0) for rank in others], [(0, rank) for rank in others])]
    sums = {"format": "fixed32", "chunk_bytes": 65536}
    plain = driver.side_by_side(spec, 2, SHARES, routes, steps, sync=sums)
    shares = {rank: order.microbatch_range for rank, order in enumerate(plain)}
    trees = tuple(RouteTree(share, root, tuple(up), tuple(down)) for share, root, up, down in routes)
    elastic = ElasticOrder({rank: rank for rank in shares}, shares, {0: trees}, dynamic=True)
    return [
        replace(
            order,
            elastic=elastic,
            weights=True,
            world=replace(order.world, hosts={r: "127.0.0.1" for r in shares if r != order.world.rank}),
        )
        for order in plain
    ]


def joining(first: RankOrder, rank: int, members: list[int], folder: Path, pace_s: float) -> RankOrder:
    """The order of one rank more, which joins those members."""
    assert first.elastic is not None
    assert first.sync is not None
    [group] = first.sync.groups
    nowhere = tuple(RoutePlace(route.share, (), None, None, ()) for route in group.routes)
    return replace(
        first,
        pipeline=rank,
        microbatch_range=(0, 1),
        compare_batches=False,
        sync=replace(first.sync, groups=(replace(group, routes=nowhere),)),
        elastic=replace(
            first.elastic,
            pipelines={number: number for number in (*members, rank)},
            join=JoinOrder(folder, pace_s, {0: 1 << 20, 1: 1 << 20}),
        ),
        world=replace(first.world, rank=rank, ranks=rank + 1, hosts=dict.fromkeys(members, "127.0.0.1")),
    )


if __name__ == "__main__":
    main()
