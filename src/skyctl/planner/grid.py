"""A plan record's stages as the planner's pieces."""

from __future__ import annotations

from skyctl.planner.model import Model, Piece
from skyctl.planner.running import Running
from skyctl.planner.verification.shape import read_stages
from skyctl.records.plan import Plan


def grid(model: Model, plan: Plan) -> tuple[tuple[Piece, ...], Running]:
    """(pieces, how they run) of a plan with one replica a stage.

    Raises:
        InputError: see ``api.predict``.
    """
    held = read_stages(model.problem, plan)
    running = Running(
        tuple(stage.in_flight for stage in held),
        tuple(stage.weights_behind for stage in held),
        tuple(stage.recompute for stage in held),
    )
    return tuple(Piece(stage.device, stage.start, stage.stop) for stage in held), running
