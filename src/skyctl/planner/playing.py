"""A plan as the simulator is given it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from skyctl.planner.grid import grid
from skyctl.planner.model import Model, Piece
from skyctl.planner.running import Running
from skyctl.records.plan import Plan
from skyctl.schedule.playing import Play
from skyctl.schedule.simulate import Boundary, StageTimes


def play_of(plan: Plan) -> Play:
    """What the plan's own prediction comes from.

    Raises:
        InputError: see ``api.predict``.
    """
    model = Model(plan.problem)
    return playable(model, *grid(model, plan))


def playable(model: Model, pieces: Sequence[Piece], running: Running) -> Play:
    """What one step of a candidate plan comes from."""
    columns = (sums.of(pieces) for sums in (model.forward, model.backward, model.optimizer, model.weight))
    beside = [model.beside_s(*piece) for piece in pieces]
    return Play(
        schedule=model.schedule,
        microbatches=model.microbatches,
        in_flight=running.flying,
        weights_behind=running.behind,
        stages=tuple(
            StageTimes(f + h, b + f + h, o) if again else StageTimes(f + h, b + h, o, min(w, b))
            for f, b, o, w, h, again in zip(*columns, beside, running.recompute, strict=True)
        ),
        boundaries=tuple(
            Boundary(model.hop(a.device, b.device, a.stop), model.hop(b.device, a.device, a.stop))
            for a, b in pairwise(pieces)
        ),
        beside_s=tuple(model.messages_s(*piece) for piece in pieces),
    )
