"""From pieces to a plan record: prediction, certificate, and the reason why a device stays unused."""

from __future__ import annotations

from collections.abc import Sequence

from skyctl.errors import InfeasibleError
from skyctl.planner import memory
from skyctl.planner.evaluate import bottleneck_s, play
from skyctl.planner.model import Model, Piece
from skyctl.planner.running import Running
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


def prediction(model: Model, pieces: Sequence[Piece], running: Running) -> Prediction:
    """What the simulator and the memory formula say of one step."""
    step = play(model, pieces, running)
    replicas = []
    needs = _needs(model, pieces, running)
    for s, (d, _, _) in enumerate(pieces):
        device = model.problem.devices[d]
        replicas.append(
            ReplicaPrediction(
                device=device.id, compute_s=step.compute_s[s], idle_s=step.idle_s[s], memory_bytes=needs[s]
            )
        )
    return Prediction(
        iteration_s=step.iteration_s,
        bottleneck_s=bottleneck_s(model, pieces, running),
        replicas=tuple(replicas),
    )


def _needs(model: Model, pieces: Sequence[Piece], running: Running) -> list[float]:
    """Bytes of each stage."""
    return [
        memory.device_bytes(model.problem, model.problem.devices[d], p, q, k, behind, recompute=again)
        for (d, p, q), k, behind, again in zip(pieces, *running, strict=True)
    ]


def require_allowed(model: Model, pieces: Sequence[Piece], running: Running, what: str) -> None:
    """Raises InfeasibleError naming the device that is too small, or in a place it may not have."""
    problem = model.problem
    for (d, p, q), need in zip(pieces, _needs(model, pieces, running), strict=True):
        device = problem.devices[d]
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
    running: Running,
    proof: Certificate,
) -> Plan:
    """The record."""
    stages = tuple(
        Stage(
            start=p,
            stop=q,
            replicas=(
                Replica(
                    device=model.ids[d],
                    microbatches=model.microbatches,
                    in_flight=flying,
                    recompute=again,
                    weights_behind=behind,
                ),
            ),
        )
        for (d, p, q), flying, behind, again in zip(pieces, *running, strict=True)
    )
    busy_s = model.work.of(pieces)
    return Plan(
        strategy=strategy,
        problem=model.problem,
        stages=stages,
        unused=unused(model, strategy, pieces, busy_s, proof),
        predicted=prediction(model, pieces, running),
        certificate=proof,
    )
