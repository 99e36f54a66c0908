"""Plans whose stages may recompute their activations: memory for time, decided stage by stage.

Three ordinary problems stand in for the mixture. *Plain*: nobody recomputes. *Whole*: everybody does.
*Relaxed*: the times of plain with the memory of whole, so no mixture is better or needs less; a bound on it
holds for all, and where nothing fits there, nothing fits at all. Where the best relaxed plan fits as it is,
that is the answer. Else plans of all three are starts for a descent in which a stage recomputes where it
would not fit otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise, product

from skyctl.errors import InfeasibleError, UndecidedError
from skyctl.planner.depths import value_s
from skyctl.planner.evaluate import bound_s, least_running
from skyctl.planner.found import Found
from skyctl.planner.heuristic.build import heuristic
from skyctl.planner.heuristic.level import level
from skyctl.planner.infeasible import raise_infeasible
from skyctl.planner.iteration import relax, split
from skyctl.planner.iteration.best_first import BestFirst
from skyctl.planner.memory import kept_bytes
from skyctl.planner.model import Model, Piece
from skyctl.planner.neighbours import moves
from skyctl.planner.optimal import optimal
from skyctl.records.problem import LayerTimes, Link, Problem

Pieces = tuple[Piece, ...]

PROVED = 1e-9
MARGIN = 1e-6
SPLIT_S = 1.0
SHARE = 0.4
"""Of the time, for the relaxed problem; ``ROOMY`` where its plan seems to fit as it is."""
ROOMY = 0.8
LOOKED_AT = 3000
"""Plans next to a plan that a descent without a deadline looks at."""
_NOT_FOUND = (
    "no plan that fits in memory was found, with stages recomputing or not, "
    "and it is not proved that there is none"
)
_SMALLER = "smaller microbatches, or a device with more memory"


def plain(problem: Problem) -> Problem:
    """Nobody recomputes."""
    return problem.model_copy(update={"recompute": False})


def whole(problem: Problem) -> Problem:
    """Everybody recomputes: backward after another forward, inputs kept only; no weight gradients put off."""
    layers = tuple(
        layer.model_copy(
            update={
                "activation_bytes": kept,
                "workspace_bytes": layer.activation_bytes + layer.workspace_bytes,
                "deferred_bytes": 0.0,
            }
        )
        for layer, kept in zip(problem.layers, kept_bytes(problem.layers), strict=True)
    )
    times = {}
    for device in problem.devices:
        known = problem.times.get(device.id)
        if known is None:
            seconds = [layer.flops / device.flops_per_s for layer in problem.layers]
            known = LayerTimes(
                forward_s=tuple(x / 3 for x in seconds),
                backward_s=tuple(x - x / 3 for x in seconds),
                optimizer_s=(0.0,) * len(seconds),
            )
        both = zip(known.forward_s, known.backward_s, strict=True)
        times[device.id] = known.model_copy(
            update={"backward_s": tuple(f + b for f, b in both), "weight_s": None}
        )
    return problem.model_copy(update={"recompute": False, "layers": layers, "times": times})


def relaxed(problem: Problem) -> Problem:
    """The times of plain, the memory of whole (the workspace of plain). Shared resources count as limits of
    each link by itself: where messages queue for one, less work elsewhere may make a step longer."""
    layers = tuple(
        layer.model_copy(update={"activation_bytes": kept, "deferred_bytes": 0.0})
        for layer, kept in zip(problem.layers, kept_bytes(problem.layers), strict=True)
    )
    links = {(link.source, link.target): link for link in problem.links}
    for resource in problem.shared:
        for source, target in resource.links:
            known = links.get((source, target))
            rate = resource.bandwidth_bytes_per_s
            if known is None:
                links[source, target] = Link(
                    source=source, target=target, latency_s=0.0, bandwidth_bytes_per_s=rate
                )
            elif rate < known.bandwidth_bytes_per_s:
                links[source, target] = known.model_copy(update={"bandwidth_bytes_per_s": rate})
    changed = {"recompute": False, "layers": layers, "links": tuple(links.values()), "shared": ()}
    return problem.model_copy(update=changed)


def good_plan(model: Model, plays: int = 150) -> Pieces:
    """The heuristic's plan, whether stages may recompute or not. Raises: see ``good``."""
    return good(model) if model.mixed else heuristic(model, plays)


def good(model: Model) -> Pieces:
    """The heuristic's plan.

    Raises:
        InfeasibleError: proved that nothing fits, however stages run.
        UndecidedError: nothing found; there may be a plan all the same.
    """
    first = heuristic(Model(relaxed(model.problem)))
    if _as_it_is(model, first):
        return first
    starts = [first, *_found(model.problem, heuristic)]
    return _descent(model, _allowed(model, starts), lambda looked: looked >= LOOKED_AT)[1]


def best(model: Model, time_limit_s: float) -> Found:
    """The best plan found, with a bound on all of them.

    Raises:
        InfeasibleError: proved that nothing fits, however stages run.
        UndecidedError: out of time with no plan and no proof.
    """
    began = time.perf_counter()
    deadline = began + time_limit_s
    if _never_full(model):
        return optimal(Model(plain(model.problem)), time_limit_s)
    if model.by_iteration and not model.zero and relax.can(model, time_limit_s):
        return _exact(model, deadline)
    loose = Model(relaxed(model.problem))
    share = SHARE
    try:
        share = ROOMY if _as_it_is(model, heuristic(loose)) else SHARE
        found = optimal(loose, share * time_limit_s)
    except UndecidedError:
        found = None
    if found is not None and _as_it_is(model, found.pieces):
        return _stated(model, found.pieces, found, found.method)

    def limited(one: Model) -> Pieces:
        return optimal(one, (deadline - time.perf_counter()) / 3).pieces

    starts = ([found.pieces] if found is not None else []) + _found(model.problem, limited)
    _, pieces = _descent(model, _allowed(model, starts), lambda _: time.perf_counter() > deadline)
    words = "best found of plans whose stages may recompute"
    if found is None or found.bound_s is None:
        return _stated(model, pieces, None, words)
    if model.zero and model.by_iteration and relax.can(model, SPLIT_S):
        low = split.least_step_s(model) * (1 - MARGIN)
        found = replace(found, bound_s=max(found.bound_s, low))
    return _stated(model, pieces, found, f"{words}; bound: nobody needs to recompute ({found.method})")


def _exact(model: Model, deadline: float) -> Found:
    """For few devices: best first over orders and cuts; who recomputes follows from them."""
    try:
        start = good(model)
    except UndecidedError:
        start = None
    found = BestFirst(model, start, deadline).run()
    if not found.pieces and found.proved:
        raise_infeasible(Model(relaxed(model.problem)), proved=True)
    if not found.pieces:
        raise UndecidedError(_NOT_FOUND, hint=_SMALLER)
    return found


def _stated(model: Model, pieces: Pieces, bound: Found | None, method: str) -> Found:
    value, running = value_s(model, pieces)
    low = None if bound is None else bound.bound_s
    proved = bound is not None and low is not None and bound.proved and value <= low * (1 + PROVED)
    return Found(pieces, running, value, low, proved, method)


def _never_full(model: Model) -> bool:
    """Whether every device could hold everything, as deep as can be."""
    m = model.microbatches
    most = model.need_bytes(0, model.layers, m, m - 1) + 2 * model.window * max(model.output)
    return all(most <= room for room in model.available)


def _as_it_is(model: Model, pieces: Pieces) -> bool:
    """Whether these stages fit with nobody recomputing."""
    running = least_running(model, pieces)
    return model.allowed(pieces) and not any(running.recompute)


def _found(problem: Problem, search: Callable[[Model], Pieces]) -> list[Pieces]:
    """A plan of plain and one of whole, where there are any."""
    out = []
    for ordinary in (plain(problem), whole(problem)):
        try:
            out.append(search(Model(ordinary)))
        except (InfeasibleError, UndecidedError):
            continue
    return out


def _allowed(model: Model, starts: Sequence[Pieces]) -> list[Pieces]:
    """Those that fit, some stages recomputing, and what fits with the same devices in the same order."""
    out = [pieces for pieces in starts if model.allowed(pieces)]
    for pieces in starts:
        levelled = level(model, [piece.device for piece in pieces])
        if levelled is not None:
            out.append(levelled[1])
    if not out:
        raise UndecidedError(_NOT_FOUND, hint=_SMALLER)
    return list(dict.fromkeys(out))


def _descent(model: Model, starts: Sequence[Pieces], over: Callable[[int], bool]) -> tuple[float, Pieces]:
    """First improvement over ``moves``, stages given up and stages cut in two, from the best start."""
    value, pieces = min((value_s(model, start)[0], start) for start in starts)
    looked = 0
    improved = True
    while improved:
        improved = False
        for other in [*moves(pieces), *_without(pieces), *_cut(model, pieces)]:
            if over(looked):
                return value, pieces
            looked += 1
            if not model.allowed(other) or (model.by_iteration and bound_s(model, other) >= value):
                continue
            cost = value_s(model, other)[0]
            if cost < value * (1 - PROVED):
                value, pieces, improved = cost, other, True
                break
    return value, pieces


def _without(pieces: Pieces) -> list[Pieces]:
    """Each boundary's two stages on either of their devices alone."""
    out = []
    for s, (a, b) in enumerate(pairwise(pieces)):
        for device in (a.device, b.device):
            out.append((*pieces[:s], Piece(device, a.start, b.stop), *pieces[s + 2 :]))
    return out


def _cut(model: Model, pieces: Pieces) -> list[Pieces]:
    """1, 2, 4, … of each stage's first or last layers on a device that has none."""
    used = {piece.device for piece in pieces}
    unused = [device for device in range(model.devices) if device not in used]
    out: list[Pieces] = []
    for s, (device, p, q) in enumerate(pieces):
        sizes = [1 << i for i in range((q - p - 1).bit_length())]
        for other, size in product(unused, sizes):
            first = Piece(other, p, p + size), Piece(device, p + size, q)
            last = Piece(device, p, q - size), Piece(other, q - size, q)
            out += [(*pieces[:s], *both, *pieces[s + 1 :]) for both in (first, last)]
    return out
