"""What a search hands back."""

from __future__ import annotations

from dataclasses import dataclass

from skyctl.planner.model import Piece
from skyctl.planner.running import Running

NOTHING = Running((), (), ())


@dataclass(frozen=True)
class Found:
    """The best plan and what is proved of it, both in seconds of the problem's objective.

    ``bound_s`` None: no bound is claimed. ``proved``: nothing is better by more than 1e-9, relative.
    """

    pieces: tuple[Piece, ...]
    running: Running
    value_s: float
    bound_s: float | None
    proved: bool
    method: str
