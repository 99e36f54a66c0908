"""What a candidate plan costs: the simulator's word, and a quick lower bound in closed form."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from skyctl.planner.model import Model, Piece
from skyctl.schedule.actions import check_in_flight
from skyctl.schedule.simulate import Boundary, Simulation, StageTimes, last_backwards, simulate


def bottleneck_s(model: Model, pieces: Sequence[Piece]) -> float:
    """The largest stage's forward and backward."""
    return max(model.work.of(pieces))


def play(model: Model, pieces: Sequence[Piece], flying: Sequence[int], trace: bool = False) -> Simulation:
    """Simulates one step."""
    columns = (sums.of(pieces) for sums in (model.forward, model.backward, model.optimizer))
    stages = [StageTimes(*times) for times in zip(*columns, strict=True)]
    boundaries = [
        Boundary(model.hop(a.device, b.device, a.stop), model.hop(b.device, a.device, a.stop))
        for a, b in pairwise(pieces)
    ]
    return simulate(model.schedule, model.microbatches, flying, stages, boundaries, trace=trace)


def step_s(model: Model, pieces: Sequence[Piece], flying: Sequence[int]) -> float:
    """Seconds of one step; the simulator's fast path where nothing is shared."""
    ways = [
        (a.stop, model.way(a.device, b.device), model.way(b.device, a.device)) for a, b in pairwise(pieces)
    ]
    if any(ahead.shared or back.shared for _, ahead, back in ways):
        return play(model, pieces, flying).iteration_s
    size = model.output
    done = last_backwards(
        model.microbatches,
        tuple(flying),
        [model.forward[d][q] - model.forward[d][p] for d, p, q in pieces],
        [model.backward[d][q] - model.backward[d][p] for d, p, q in pieces],
        ahead=[(size[cut - 1] * w.seconds_per_byte, w.latency_s) for cut, w, _ in ways],
        back=[(size[cut - 1] * w.seconds_per_byte, w.latency_s) for cut, _, w in ways],
    )
    ends = (
        at + model.optimizer[d][q] - model.optimizer[d][p] for at, (d, p, q) in zip(done, pieces, strict=True)
    )
    return max(ends)


def value_s(model: Model, pieces: Sequence[Piece]) -> tuple[float, tuple[int, ...]]:
    """(the objective, the in-flight numbers chosen) of an allowed plan."""
    if not model.by_iteration:
        return bottleneck_s(model, pieces), least_flying(model, len(pieces))
    best: tuple[float, tuple[int, ...]] | None = None
    for flying in flying_choices(model, pieces):
        value = step_s(model, pieces, flying)
        if best is None or value < best[0]:
            best = (value, flying)
    assert best is not None
    return best


def least_flying(model: Model, stages: int) -> tuple[int, ...]:
    """The schedule's own numbers (for eager 1F1B, the least)."""
    return tuple(model.flying(s, stages) for s in range(stages))


def flying_choices(model: Model, pieces: Sequence[Piece]) -> list[tuple[int, ...]]:
    """In-flight numbers to try, the least first: one for a static schedule, a few depths for eager 1F1B."""
    count = len(pieces)
    least = least_flying(model, count)
    if not model.eager:
        return [least]
    most = most_flying(model, pieces)
    choices = [least]
    for depth in (1.5, 2.0, 3.0, 4.0, float(model.microbatches)):
        wanted: list[int] = []
        for s in range(count):
            number = min(most[s], int(depth * (count - s - 1)) + 1)
            wanted.append(max(least[s], min(number, wanted[-1]) if wanted else number))
        if (
            tuple(wanted) not in choices
            and check_in_flight(model.schedule, wanted, model.microbatches) is None
        ):
            choices.append(tuple(wanted))
    return choices


def most_flying(model: Model, pieces: Sequence[Piece]) -> tuple[int, ...]:
    """The most that memory allows each stage, and no more than the stage before it (eager 1F1B)."""
    out: list[int] = []
    for s, (d, p, q) in enumerate(pieces):
        low = model.flying(s, len(pieces))
        high = max(low, out[-1] if out else model.microbatches)
        while low < high:
            middle = (low + high + 1) // 2
            if model.fits(d, p, q, middle):
                low = middle
            else:
                high = middle - 1
        out.append(low)
    return tuple(out)


def bound_s(model: Model, pieces: Sequence[Piece]) -> float:
    """A lower bound on the step's time, whatever the in-flight numbers allowed: paths through the play.

    For every stage: fill up to it, all its own work with the wait for its first gradient, drain after it,
    optimizers. For every link: fill, all its messages, the way back. For every shared resource: all that
    must pass it.
    """
    count = len(pieces)
    m = model.microbatches
    most = most_flying(model, pieces) if model.eager else least_flying(model, count)
    f = [model.forward[d][q] - model.forward[d][p] for d, p, q in pieces]
    b = [model.backward[d][q] - model.backward[d][p] for d, p, q in pieces]
    o = [model.optimizer[d][q] - model.optimizer[d][p] for d, p, q in pieces]
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
        out = max(out, fill + end + o[s])
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
