"""Plans with a parameter server: a star at the first holder, and its steps played with measured draws.

Holders, root and shares are those of the best star that sums: with the same work and the same lines. What
is predicted is a step in the long run, of a play (``schedule.stale_simulation``) in which each device's steps
are as uneven as they were measured to be.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from skyctl.errors import InputError
from skyctl.planner.data.data_placement import DataPlacement
from skyctl.planner.data.holder_costs import DataModel
from skyctl.records.plan import Certificate, Plan, Prediction, ReplicaPrediction
from skyctl.records.problem import Device, Problem
from skyctl.records.stale_prediction import StalePrediction
from skyctl.schedule.simulation import MessageTimes
from skyctl.schedule.stale_simulation import WorkerTimes, simulate_stale

CLOCKS = 4000
"""Of a play; the first tenth is not counted."""
METHOD = "as for sums, then played with measured steps"


def star_problem(problem: Problem) -> Problem:
    """The problem as it is planned: where a parameter server is asked for, over a star.

    Raises:
        InputError: it asks for what does not go with one.
    """
    if not problem.rhythm.is_stale:
        return problem
    if problem.sync not in ("auto", "star"):
        raise InputError(
            f"with --staleness one device that computes holds the weights for all: a star, and not --sync "
            f"{problem.sync}",
            hint="leave --sync out",
        )
    if problem.helpers:
        raise InputError(
            f"with --staleness the device that holds the weights computes as well, so {problem.helpers[0]} "
            "can't help",
            hint="leave --helper out",
        )
    if problem.sync_format != "float32":
        raise InputError(
            f"with --staleness gradients and weights travel as float32, not as {problem.sync_format}",
            hint="leave --sync-format out",
        )
    return problem.model_copy(update={"sync": "star"})


def with_server(model: DataModel, placed: DataPlacement, made: Plan) -> Plan:
    """The plan of sums over a star as one with a parameter server: its root first, its steps as played."""
    if len(placed.holders) == 1:
        return made
    order = sorted(range(len(placed.holders)), key=lambda n: n != root_of(placed))
    predicted = predict_stale(model, placed)
    proof = Certificate(
        status="feasible",
        value_s=predicted.iteration_s,
        lower_bound_s=None,
        gap=None,
        method=f"{made.certificate.method}; {METHOD}",
        wall_s=made.certificate.wall_s,
    )
    return made.model_copy(
        update={
            "pipelines": tuple(made.pipelines[number] for number in order),
            "predicted": predicted.model_copy(
                update={"replicas": tuple(predicted.replicas[number] for number in order)}
            ),
            "certificate": proof,
        }
    )


def root_of(placed: DataPlacement) -> int:
    """The place among the holders of the one that holds the weights."""
    return max(range(len(placed.holders)), key=lambda n: placed.group.use.children.get(placed.holders[n], 0))


def predict_stale(model: DataModel, placed: DataPlacement) -> Prediction:
    """What a step takes in the long run, and what it would without staleness under the same draws."""
    workers = worker_times(model, placed)
    skipped, clocks = CLOCKS // 10, CLOCKS
    staleness = model.problem.rhythm.staleness
    least = [worker.least_s for worker in workers]
    step_s = max(*least, simulate_stale(workers, staleness).clock_s(skipped))
    slowest = max(range(len(workers)), key=lambda number: least[number])
    devices = [model.problem.devices[d] for d in placed.holders]
    compute = [sum(worker.compute_s) / clocks for worker in workers]
    return Prediction(
        iteration_s=step_s,
        bottleneck_s=max(cost.layers_s for cost in placed.group.costs),
        replicas=tuple(
            ReplicaPrediction(
                device=device.id,
                compute_s=compute_s,
                idle_s=max(0.0, step_s - compute_s),
                memory_bytes=need,
            )
            for device, compute_s, need in zip(devices, compute, placed.memory_bytes, strict=True)
        ),
        stale=StalePrediction(
            synchronous_s=max(step_s, simulate_stale(workers, 0).clock_s(skipped)),
            bound_s=least[slowest],
            slowest=devices[slowest].id,
            unknown=tuple(device.id for device in devices if not device.step_factors),
        ),
    )


def worker_times(model: DataModel, placed: DataPlacement) -> list[WorkerTimes]:
    """By holder, what its clocks take: with draws of their own, the same for the same device."""
    root, size = placed.holders[root_of(placed)], model.total_bytes
    apply_s = placed.group.costs[root_of(placed)].optimizer_s
    passing_s = 2 * size * model.problem.devices[root].message_byte_s
    found = []
    for d, share, cost in zip(placed.holders, placed.shares, placed.group.costs, strict=True):
        compute_s = [share * cost.microbatch_s * x for x in drawn_factors(model.problem.devices[d], CLOCKS)]
        if d == root:
            found.append(WorkerTimes(compute_s, apply_s=apply_s))
            continue
        push, pull = (_message(model, pair, size) for pair in ((d, root), (root, d)))
        found.append(WorkerTimes(compute_s, push, pull, apply_s + passing_s))
    return found


def drawn_factors(device: Device, count: int) -> Sequence[float]:
    """So many of a device's factors, drawn by its name; their mean is that of the factors themselves."""
    known = device.step_factors
    if not known:
        return [1.0] * count
    drawn = random.Random(device.id).choices(known, k=count)  # noqa: S311 — draws, no secrets
    correction = sum(known) / len(known) / (sum(drawn) / count)
    return [factor * correction for factor in drawn]


def _message(model: DataModel, pair: tuple[int, int], size: float) -> MessageTimes:
    shared = tuple((name, byte_s * size) for name, byte_s in model.shared.get(pair, ()))
    return MessageTimes(model.byte_s.get(pair, 0.0) * size, model.latency_s.get(pair, 0.0), shared)
