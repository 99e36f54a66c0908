"""Layers that sleep a known time over links of a known rate: is a step as short as it can be?

Every stage's device and every link's direction gives a lower bound of the step (``bound_s``). The ranks are
the real worker's, each in a network namespace of its own; the plan (depths) is the planner's for the numbers
told, so nothing here is tuned by hand. ``torch.distributed.pipelining`` runs the same cut, links and
microbatches right after (``stock.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from runs.driver import sleeping_workload, worker_driver
from runs.stock import stock_step_s
from runs.wires import Chain, Wire, chain
from skyctl import Plan, Problem, plan

WIDTH = 65536
MESSAGE_BYTES = 4 * WIDTH
MICROBATCHES = 32
LATENCY_S = 0.010
STEPS = 10
SETTLED = 2
"""Steps left out: the first connects and fills TCP's window."""


@dataclass(frozen=True)
class Case:
    """``times``: per stage seconds of a microbatch's forward and backward. ``share``: what a message takes
    on each link, as part of the compute of a microbatch on the busiest stage."""

    name: str
    times: tuple[tuple[float, float], ...]
    share: float
    stock: bool = False

    @property
    def send_s(self) -> float:
        return self.share * max(f + b for f, b in self.times)

    @property
    def wires(self) -> list[Wire]:
        return [Wire(MESSAGE_BYTES / self.send_s, LATENCY_S)] * (len(self.times) - 1)


TWO = ((0.020, 0.040),) * 2
FOUR = ((0.020, 0.040),) * 4
CASES = [
    Case(f"{len(times)} stages, links at {share:.0%}", times, share, stock=share == 0.8)
    for times in (TWO, FOUR)
    for share in (0.4, 0.8, 1.2)
]


def bound_s(case: Case, microbatches: int = MICROBATCHES) -> float:
    """No step is shorter: the busiest device with its fill and drain, or the busiest direction of a link.

    For stage s: Σ over earlier t of (f + x + latency), all its own work, Σ (b + x + latency). For a link
    forward: what comes before its first message, all messages, and what the last one must still go through;
    for a link backward the same.
    """
    f, b = zip(*case.times, strict=True)
    x, way = case.send_s, case.send_s + LATENCY_S
    count, m = len(case.times), microbatches
    trip = [0.0] * count  # one microbatch from stage s on, there and back
    for s in reversed(range(count)):
        trip[s] = f[s] + b[s] + (2 * way + trip[s + 1] if s + 1 < count else 0.0)
    out = 0.0
    for s in range(count):
        fill, drain = sum(f[:s]) + s * way, sum(b[:s]) + s * way
        out = max(out, fill + m * (f[s] + b[s]) + drain)
        if s + 1 < count:
            ahead = fill + f[s] + m * x + LATENCY_S + trip[s + 1] + way + b[s] + drain
            back = fill + f[s] + way + trip[s + 1] + m * x + LATENCY_S + b[s] + drain
            out = max(out, ahead, back)
    return out


def planned(case: Case) -> Plan:
    """The planner's plan for these numbers: one layer a stage, in the order given."""
    names = [f"n{s}/cpu:0" for s in range(len(case.times))]
    f, b = zip(*case.times, strict=True)
    times = {"forward_s": list(f), "backward_s": list(b), "optimizer_s": [0.0] * len(names)}
    problem = Problem.model_validate(
        {
            "kind": "skyctl/problem",
            "version": 1,
            "layers": [
                {"name": f"layer.{s}", "flops": 1.0, "state_bytes": 4.0}
                | {"activation_bytes": float(MESSAGE_BYTES), "output_bytes": float(MESSAGE_BYTES)}
                for s in range(len(names))
            ],
            "devices": [{"id": name, "flops_per_s": 1.0, "memory_bytes": None} for name in names],
            "times": dict.fromkeys(names, times),
            "links": [
                {"source": a, "target": b, "latency_s": LATENCY_S}
                | {"bandwidth_bytes_per_s": MESSAGE_BYTES / case.send_s}
                for i, a in enumerate(names)
                for j, b in enumerate(names)
                if abs(i - j) == 1
            ],
            "microbatches": MICROBATCHES,
            "schedule": "eager-1f1b",
        }
    )
    return plan(problem, assign=[(name, s, s + 1) for s, name in enumerate(names)])


def sleeping(cases: Sequence[Case] = tuple(CASES), stock: bool = True) -> Iterator[dict[str, Any]]:
    """One figure a case."""
    for case in cases:
        yield _one(case, stock and case.stock)


def _one(case: Case, stock: bool) -> dict[str, Any]:
    made = planned(case)
    with chain(case.wires) as wires, TemporaryDirectory() as name:
        measured = _measured(case, made, wires, Path(name))
        theirs = stock_step_s(case.times, WIDTH, MICROBATCHES, wires) if stock else None
    bound = bound_s(case)
    found: dict[str, Any] = {
        "benchmark": "runtime",
        "section": "sleeping",
        "case": case.name,
        "microbatches": MICROBATCHES,
        "depths": [stage.replicas[0].in_flight for stage in made.stages],
        "measured_s": round(measured, 4),
        "bound_s": round(bound, 4),
        "predicted_s": round(made.predicted.iteration_s, 4),
        "of_bound": round(measured / bound, 4),
    }
    if theirs is not None:
        found |= {"stock_s": round(theirs, 4), "stock_of_ours": round(theirs / measured, 3)}
    return found


def _measured(case: Case, made: Plan, wires: Chain, folder: Path) -> float:
    driver = worker_driver()
    path = folder / "train.py"
    sleeping_workload(path, case.times, WIDTH)
    spec = {"source": str(path), "path": str(path), "batch_size": MICROBATCHES}
    stages = len(case.times)
    window = made.problem.receive_window
    told = driver.orders(
        spec, list(range(stages + 1)), MICROBATCHES, "eager-1f1b", STEPS, receive_window=window
    )
    orders = []
    for s, order in enumerate(told):
        hosts = {other: Chain.address(other, s) for other in order.world.hosts}
        in_flight = made.stages[s].replicas[0].in_flight
        orders.append(replace(order, in_flight=in_flight, world=replace(order.world, hosts=hosts)))
    pool = driver.Pool(stages, folder, wires.prefix)
    try:
        outcome = pool.run(orders)
    finally:
        pool.close()
    if outcome.errors:
        raise SystemExit(f"{case.name}: {outcome.errors}")
    return median(float(event["iteration_s"]) for event in outcome.steps[0][SETTLED:])
