"""From pieces to a plan record: prediction, certificate, and the reason why a device stays unused."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from skyctl.errors import InfeasibleError
from skyctl.planner import memory
from skyctl.planner.model import Model, Piece, Sums
from skyctl.planner.unused import unused
from skyctl.records.plan import (
    Certificate,
    Plan,
    Prediction,
    Replica,
    ReplicaPrediction,
    Stage,
    Strategy,
)
from skyctl.schedule.simulate import Boundary, StageTimes, simulate

MANY = 500_000
"""Stages × layers from which on prefix sums are not kept as lists: they would fill the memory."""


def prediction(model: Model, pieces: Sequence[Piece], flying: Sequence[int]) -> Prediction:
    """What the simulator and the memory formula say of one step."""
    forward, backward, optimizer = (
        spans(model, sums, pieces) for sums in (model.forward, model.backward, model.optimizer)
    )
    step = simulate(
        model.schedule,
        model.microbatches,
        flying,
        [StageTimes(*times) for times in zip(forward, backward, optimizer, strict=True)],
        [
            Boundary(model.hop(a.device, b.device, a.stop), model.hop(b.device, a.device, a.stop))
            for a, b in pairwise(pieces)
        ],
    )
    replicas = []
    for s, (d, p, q) in enumerate(pieces):
        device = model.problem.devices[d]
        need = memory.device_bytes(model.problem, device, p, q, flying[s])
        replicas.append(
            ReplicaPrediction(
                device=device.id, compute_s=step.compute_s[s], idle_s=step.idle_s[s], memory_bytes=need
            )
        )
    return Prediction(
        iteration_s=step.iteration_s,
        bottleneck_s=max(spans(model, model.work, pieces)),
        replicas=tuple(replicas),
    )


def spans(model: Model, sums: Sums, pieces: Sequence[Piece]) -> list[float]:
    """Seconds of each piece on its device."""
    if len(pieces) * model.layers < MANY:
        return [sums[d][q] - sums[d][p] for d, p, q in pieces]
    arrays = ((sums.array(d), p, q) for d, p, q in pieces)
    return [float(array[q] - array[p]) for array, p, q in arrays]


def require_allowed(model: Model, pieces: Sequence[Piece], flying: Sequence[int], what: str) -> None:
    """Raises InfeasibleError naming the device that is too small, or in a place it may not have."""
    problem = model.problem
    for s, (d, p, q) in enumerate(pieces):
        device = problem.devices[d]
        need = memory.device_bytes(problem, device, p, q, flying[s])
        if not memory.fits(need, device):
            assert device.memory_bytes is not None
            raise InfeasibleError(
                f"{what} gives {device.id} layers [{p}, {q}), which need {memory.human(need)}; "
                f"it has {memory.human(device.memory_bytes)}",
                hint="another strategy may fit: heuristic or optimal",
            )
    for names, d, where in (
        (problem.first_stage, pieces[0].device, "first"),
        (problem.last_stage, pieces[-1].device, "last"),
    ):
        if names is not None and model.ids[d] not in names:
            allowed = ", ".join(names) if names else "none"
            raise InfeasibleError(
                f"{what} puts {model.ids[d]} at the {where} stage; allowed there: {allowed}",
                hint="another strategy may fit: heuristic or optimal",
            )


def certificate(
    value: float, bound: float | None, *, proved: bool, method: str, wall_s: float
) -> Certificate:
    """An honest one: ``optimal`` only where proved, ``bounded`` only with a bound above zero."""
    if proved:
        return Certificate(
            status="optimal", value_s=value, lower_bound_s=value, gap=0.0, method=method, wall_s=wall_s
        )
    if bound is None or bound <= 0:
        return Certificate(
            status="feasible", value_s=value, lower_bound_s=None, gap=None, method=method, wall_s=wall_s
        )
    bound = min(bound, value)
    gap = value / bound - 1
    status = "optimal" if gap <= 1e-9 else "bounded"
    return Certificate(
        status=status,  # type: ignore[arg-type]
        value_s=value,
        lower_bound_s=bound,
        gap=gap,
        method=method,
        wall_s=wall_s,
    )


def make_plan(
    model: Model,
    strategy: Strategy,
    pieces: Sequence[Piece],
    flying: Sequence[int],
    proof: Certificate,
) -> Plan:
    """The record."""
    stages = tuple(
        Stage(
            start=p,
            stop=q,
            replicas=(Replica(device=model.ids[d], microbatches=model.microbatches, in_flight=flying[s]),),
        )
        for s, (d, p, q) in enumerate(pieces)
    )
    busy_s = spans(model, model.work, pieces)
    return Plan(
        strategy=strategy,
        problem=model.problem,
        stages=stages,
        unused=unused(model, strategy, pieces, busy_s, proof),
        predicted=prediction(model, pieces, flying),
        certificate=proof,
    )
