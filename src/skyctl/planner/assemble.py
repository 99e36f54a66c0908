"""From pieces to a plan record: prediction, certificate, and the reason why a device stays unused."""

from __future__ import annotations

from collections.abc import Sequence

from skyctl.errors import InfeasibleError
from skyctl.planner import memory
from skyctl.planner.evaluate import bottleneck_s, play, step_s
from skyctl.planner.model import Model, Piece
from skyctl.records.plan import (
    Certificate,
    Plan,
    Prediction,
    Replica,
    ReplicaPrediction,
    Stage,
    Strategy,
    Unused,
)

TRIES = 400
"""Insertions tried per unused device to say what using it would cost."""


def prediction(model: Model, pieces: Sequence[Piece], flying: Sequence[int]) -> Prediction:
    """What the simulator and the memory formula say of one step."""
    step = play(model, pieces, flying)
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
        iteration_s=step.iteration_s, bottleneck_s=bottleneck_s(model, pieces), replicas=tuple(replicas)
    )


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
    return Plan(
        strategy=strategy,
        problem=model.problem,
        stages=stages,
        unused=unused(model, strategy, pieces, proof.value_s),
        predicted=prediction(model, pieces, flying),
        certificate=proof,
    )


def unused(model: Model, strategy: Strategy, pieces: Sequence[Piece], value: float) -> tuple[Unused, ...]:
    """Why each device that holds nothing does."""
    used = {piece.device for piece in pieces}
    out = []
    for d in range(model.devices):
        if d in used:
            continue
        if model.layers <= len(pieces):
            reason = f"only {model.layers} layers"
        elif strategy == "assigned":
            reason = "not assigned"
        else:
            reason = _cost_of_using(model, pieces, d, value)
        out.append(Unused(device=model.ids[d], reason=reason))
    return tuple(out)


def _cost_of_using(model: Model, pieces: Sequence[Piece], device: int, value: float) -> str:
    """Tries it in every place, with a few sizes of share taken from its neighbours."""
    best: float | None = None
    tried = 0
    for candidate in insertions(pieces, device):
        tried += 1
        if tried > TRIES:
            break
        if model.allowed(candidate):
            cost = _cost(model, candidate)
            best = cost if best is None else min(best, cost)
    if best is None:
        return "no layer fits it in any place" if tried else "there is no place for it"
    if value <= 0:
        return "nothing would be gained"
    change = best / value - 1
    what = "step" if model.by_iteration else "largest stage"
    if change > 0.0005:
        verb = "slow every step" if model.by_iteration else "raise the largest stage's time"
        return f"using it would {verb} by {_percent(change)}"
    if change < -0.0005:  # only a plan that is not proved can say this
        return f"using it could save {_percent(-change)} of the {what}; the search stopped before"
    return "using it would gain nothing"


def _percent(share: float) -> str:
    percent = share * 100
    return f"{percent:.0f}%" if percent >= 9.5 else f"{percent:.2g}%"


def _cost(model: Model, pieces: Sequence[Piece]) -> float:
    if not model.by_iteration:
        return bottleneck_s(model, pieces)
    return step_s(model, pieces, tuple(model.flying(s, len(pieces)) for s in range(len(pieces))))


def insertions(pieces: Sequence[Piece], device: int) -> list[tuple[Piece, ...]]:
    """Plans that also use ``device``: before each stage (layers from it) or after it, 1, 2, 4, … layers."""
    out: list[tuple[Piece, ...]] = []
    for s, piece in enumerate(pieces):
        size = 1
        while size < piece.stop - piece.start:
            head = (
                Piece(device, piece.start, piece.start + size),
                Piece(piece.device, piece.start + size, piece.stop),
            )
            tail = (
                Piece(piece.device, piece.start, piece.stop - size),
                Piece(device, piece.stop - size, piece.stop),
            )
            out.extend((*pieces[:s], *pair, *pieces[s + 1 :]) for pair in (head, tail))
            size *= 2
    return out
