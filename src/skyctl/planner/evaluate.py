"""What a candidate plan costs: the simulator's word, and a quick lower bound in closed form."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from skyctl.planner.model import Model, Piece
from skyctl.planner.playing import playable
from skyctl.planner.running import Running
from skyctl.schedule.simulate import Simulation, last_backwards


def bottleneck_s(model: Model, pieces: Sequence[Piece], running: Running | None = None) -> float:
    """The largest stage's forward and backward (what it computes again included)."""
    work = model.work.of(pieces)
    if running is not None and any(running.recompute):
        again = model.forward.of(pieces)
        work = [w + f if r else w for w, f, r in zip(work, again, running.recompute, strict=True)]
    return max(work)


def play(model: Model, pieces: Sequence[Piece], running: Running, trace: bool = False) -> Simulation:
    """Simulates one step."""
    return playable(model, pieces, running).simulate(trace=trace)


def step_s(model: Model, pieces: Sequence[Piece], running: Running) -> float:
    """Seconds of one step; the simulator's fast path where nothing is shared."""
    ways = [
        (a.stop, model.way(a.device, b.device), model.way(b.device, a.device)) for a, b in pairwise(pieces)
    ]
    if any(ahead.shared or back.shared for _, ahead, back in ways):
        return play(model, pieces, running).iteration_s
    size = model.output
    forward = [model.forward[d][q] - model.forward[d][p] for d, p, q in pieces]
    backward = [model.backward[d][q] - model.backward[d][p] for d, p, q in pieces]
    if any(running.recompute):
        backward = [b + f if r else b for f, b, r in zip(forward, backward, running.recompute, strict=True)]
    if model.handled:
        forward = [f + model.beside_s(*piece) for f, piece in zip(forward, pieces, strict=True)]
        backward = [b + model.beside_s(*piece) for b, piece in zip(backward, pieces, strict=True)]
    weight = None
    if model.zero:
        weight = [
            0.0 if r else min(b, model.weight[d][q] - model.weight[d][p])
            for (d, p, q), b, r in zip(pieces, backward, running.recompute, strict=True)
        ]
    done = last_backwards(
        model.microbatches,
        running.flying,
        forward,
        backward,
        ahead=[(size[cut - 1] * w.seconds_per_byte, w.latency_s) for cut, w, _ in ways],
        back=[(size[cut - 1] * w.seconds_per_byte, w.latency_s) for cut, _, w in ways],
        weight_s=weight,
        weights_behind=running.behind if model.zero else None,
    )
    ends = (
        at + model.optimizer[d][q] - model.optimizer[d][p] for at, (d, p, q) in zip(done, pieces, strict=True)
    )
    return max(ends)


def objective_s(model: Model, pieces: Sequence[Piece], running: Running) -> float:
    """Seconds of the problem's objective."""
    return step_s(model, pieces, running) if model.by_iteration else bottleneck_s(model, pieces, running)


def least_running(model: Model, pieces: Sequence[Piece]) -> Running:
    """The schedule's own numbers, the least where a plan may choose; recomputing where it does not fit
    otherwise."""
    count = len(pieces)
    flying = tuple(model.flying(s, count) for s in range(count))
    again = (False,) * count
    if model.mixed:
        again = tuple(
            not model.fits(d, p, q, k, recompute=False) for (d, p, q), k in zip(pieces, flying, strict=True)
        )
    return Running(flying, (0,) * count, again)


def most_flying(model: Model, pieces: Sequence[Piece]) -> tuple[int, ...]:
    """The most that memory allows each stage, however it runs, and no more than the stage before it."""
    out: list[int] = []
    for s, (d, p, q) in enumerate(pieces):
        low = model.flying(s, len(pieces))
        out.append(most_within(model, (d, p, q), low, max(low, out[-1] if out else model.microbatches)))
    return tuple(out)


def most_within(
    model: Model, piece: tuple[int, int, int], low: int, high: int, recompute: bool | None = None
) -> int:
    """The most in flight from ``low`` (which is taken to fit) to ``high`` that fits."""
    d, p, q = piece
    while low < high:
        middle = (low + high + 1) // 2
        if model.fits(d, p, q, middle, 0, recompute):
            low = middle
        else:
            high = middle - 1
    return low


def bound_s(model: Model, pieces: Sequence[Piece]) -> float:
    """A lower bound on the step's time, whatever the in-flight numbers allowed: paths through the play.

    For every stage: fill up to it, all its own work with the wait for its first gradient, drain after it,
    optimizers. For every link: fill, all its messages, the way back. For every shared resource: all that
    must pass it. Weight gradients that may be put off are on no path but their own stage's, and stages count
    as not recomputing.
    """
    count = len(pieces)
    m = model.microbatches
    most = most_flying(model, pieces) if model.eager else least_running(model, pieces).flying
    f = [model.forward[d][q] - model.forward[d][p] + model.beside_s(d, p, q) for d, p, q in pieces]
    b = [model.backward[d][q] - model.backward[d][p] + model.beside_s(d, p, q) for d, p, q in pieces]
    o = [model.optimizer[d][q] - model.optimizer[d][p] for d, p, q in pieces]
    w = [0.0] * count
    if model.zero:
        w = [model.weight[d][q] - model.weight[d][p] for d, p, q in pieces]
        b = [max(0.0, whole - part) for whole, part in zip(b, w, strict=True)]
    hops = [
        (model.occupancy_s(x.device, y.device, x.stop), model.occupancy_s(y.device, x.device, x.stop))
        for x, y in pairwise(pieces)
    ]
    end = 0.0  # of the last backward, counted from the start of the stage's first forward
    trip = 0.0  # one microbatch, from there through all later stages and back, this stage included
    out = 0.0
    for s in range(count - 1, -1, -1):
        beyond = 0.0
        ahead_s = back_s = 0.0
        through = 0.0
        if s < count - 1:
            (ahead_s, ahead_latency), (back_s, back_latency) = hops[s]
            beyond = ahead_s + ahead_latency + trip + back_s + back_latency
            through = f[s] + b[s] + ahead_latency + back_latency
            through = max(
                through + ahead_s + back_s + end,
                through + (m - 1) * max(ahead_s, back_s) + ahead_s + back_s + trip,
            )
        own = own_s(m, most[s], f[s], b[s], beyond)
        end = max(own, through)
        trip = f[s] + b[s] + beyond
        fill = sum(f[j] + hops[j][0][0] + hops[j][0][1] for j in range(s))
        last = end + w[s]
        if w[s]:  # put off until any time after their backward, but not before the first one
            last = max(last, m * (f[s] + b[s] + w[s]) + max(0.0, beyond - (most[s] - 1) * f[s]))
        out = max(out, fill + last + o[s])
    return max(out, _shared_s(model, pieces))


def own_s(m: int, flying: int, forward: float, backward: float, beyond: float) -> float:
    """Least seconds from a stage's first forward's start to its last backward's end.

    ``beyond``: what one microbatch takes from its forward's end there until its gradient arrives. Three
    paths: all its work with the wait for the first gradient; the same with the wait for the last one; and
    turn after turn where ``flying`` in flight do not cover ``beyond``.
    """
    wait = max(0.0, beyond - (flying - 1) * forward)
    if m > flying:
        own = m * forward + (m - flying + 1) * backward + wait + max(beyond, (flying - 1) * backward)
    else:
        own = m * forward + max(m * backward + wait, backward + beyond)
    turns = -(-m // flying)
    rest = m - 1 - (turns - 1) * flying
    return max(own, turns * (forward + backward + beyond) + rest * backward)


def _shared_s(model: Model, pieces: Sequence[Piece]) -> float:
    load: dict[int, float] = {}
    for a, b in pairwise(pieces):
        for way in (model.way(a.device, b.device), model.way(b.device, a.device)):
            for number, rate in way.shared:
                load[number] = load.get(number, 0.0) + model.microbatches * rate * model.output[a.stop - 1]
    return max(load.values(), default=0.0)
