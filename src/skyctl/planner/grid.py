"""A plan record's stages as the planner's pieces."""

from __future__ import annotations

from skyctl.planner.model import Model, Piece
from skyctl.planner.verification.shape import read_stages
from skyctl.records.plan import Plan


def grid(model: Model, plan: Plan) -> tuple[tuple[Piece, ...], tuple[int, ...]]:
    """(pieces, in-flight numbers) of a plan with one replica a stage.

    Raises:
        InputError: see ``api.predict``.
    """
    held = read_stages(model.problem, plan)
    return tuple(Piece(d, p, q) for d, p, q, _ in held), tuple(stage.in_flight for stage in held)
