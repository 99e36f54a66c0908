"""CP-SAT's two models behind one question: is there a plan within a limit?"""

from __future__ import annotations

from skyctl.planner.bottleneck.periodic import MARGIN
from skyctl.planner.bottleneck.reach import Reach
from skyctl.planner.model import Piece
from skyctl.planner.solver import Solver, covering

Pieces = tuple[Piece, ...]

MAX_CELLS = 8_000


class Covering:
    """A path of largest ranges, a small model; stages as intervals where its memory is not the plan's."""

    def __init__(self, reach: Reach, deadline: float) -> None:
        self.reach, self.deadline = reach, deadline
        self._solver = Solver(reach.model, deadline)

    @staticmethod
    def can(reach: Reach) -> bool:
        """Whether the models stay small enough to be of use."""
        return len(reach.members) * reach.layers <= MAX_CELLS

    def cover(self, limit_s: float, strict: bool) -> Pieces | None:
        """See ``narrow.Cover``."""
        reach = self.reach
        within = limit_s * (1 - MARGIN) if strict else limit_s
        far = reach.far(within, reach.flying)
        stages = covering(reach.layers, far, reach.sizes.tolist(), self.deadline)
        if stages is None:
            return None
        pieces = self._laid_out(stages)
        if reach.model.allowed(pieces):
            return pieces
        return self._solver.cover(limit_s, strict)

    def _laid_out(self, stages: list[tuple[int, int, int]]) -> Pieces:
        """As few of the ranges as cover all layers, without their overlaps."""
        free = [list(group) for group in self.reach.members]
        pieces = []
        at = 0
        while at < self.reach.layers:
            row, _, stop = max((x for x in stages if x[1] <= at), key=lambda x: x[2])
            pieces.append(Piece(free[row].pop(0), at, stop))
            at = stop
        return tuple(pieces)
