"""Wall seconds per CPU second of one thread, read in pieces, without those in which it waited for something.

While a layer is built, its code or the user's may be read from a disk: the thread then neither runs nor
waits for a processor. Counted as if it were the quota's doing, that would make all layers of a node too
slow. The kernel tells the three apart in ``/proc/thread-self/schedstat``: running, waiting for a
processor (held back by a quota included), and the rest. Short waits under a quota cost nothing, because what
was not used then may be used later in the same period: only whole pieces are left out.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from pathlib import Path

SCHEDSTAT = Path("/proc/thread-self/schedstat")
PIECE_S = 0.2
PIECE_PERIODS = 10
"""A piece is at least so long: a period more or less in it must not matter."""

QUIET = 0.05
"""A piece counts where the thread waited for other things than a processor for at most this part of it."""

ENOUGH = 0.25
"""Where less than this part of the CPU time is in such pieces, the calmest ones with so much count."""


@dataclass(frozen=True)
class Piece:
    """``blocked_s``: neither running nor waiting for a processor."""

    wall_s: float
    cpu_s: float
    blocked_s: float


def scheduled() -> tuple[float, float] | None:
    """(seconds run, seconds waited for a processor) of this thread so far; None where it is not told."""
    try:
        ran, waited = map(int, SCHEDSTAT.read_text().split()[:2])
    except (OSError, ValueError):
        return None
    return (ran / 1e9, waited / 1e9) if ran else None  # a kernel that does not count says 0


@dataclass
class Stretches:
    """The pieces so far. ``period_s``: of the quota, 0 without one."""

    period_s: float = 0.0
    pieces: list[Piece] = field(default_factory=list)
    _wall_s: float = 0.0
    _cpu_s: float = 0.0
    _since: tuple[float, float] | None = field(default=None)
    """Of ``scheduled``, when the piece began."""

    def __post_init__(self) -> None:
        self._since = scheduled()

    def add(self, wall_s: float, cpu_s: float) -> None:
        """A repetition with what lay before it, in one go with the last one."""
        self._wall_s += wall_s
        self._cpu_s += cpu_s
        if self._wall_s >= max(PIECE_S, PIECE_PERIODS * self.period_s):
            now, before = scheduled(), self._since
            blocked_s = 0.0
            if now is not None and before is not None:
                blocked_s = max(0.0, self._wall_s - (now[0] - before[0]) - (now[1] - before[1]))
            self.pieces.append(Piece(self._wall_s, self._cpu_s, blocked_s))
            self._wall_s = self._cpu_s = 0.0
            self._since = now

    def kept(self) -> list[Piece]:
        """The pieces that count."""
        calm = sorted(self.pieces, key=lambda piece: piece.blocked_s / piece.wall_s)
        wanted_s = ENOUGH * sum(piece.cpu_s for piece in calm)
        chosen: list[Piece] = []
        for piece in calm:
            if piece.blocked_s > QUIET * piece.wall_s and sum(p.cpu_s for p in chosen) >= wanted_s:
                break
            chosen.append(piece)
        return chosen

    def stretch(self) -> float | None:
        """Of the pieces that count; None where there is none yet."""
        kept = self.kept()
        cpu_s = sum(piece.cpu_s for piece in kept)
        return sum(piece.wall_s for piece in kept) / cpu_s if cpu_s > 0 else None

    def interval(self) -> float:
        """Half of its 95% interval (two standard errors over the pieces), relative to it; 0: not known."""
        values = [piece.wall_s / piece.cpu_s for piece in self.kept() if piece.cpu_s > 0]
        if len(values) < 3:
            return 0.0
        return 2 * statistics.stdev(values) / math.sqrt(len(values)) / statistics.fmean(values)

    def left_out_s(self) -> float:
        """Seconds that the thread stood still in the pieces that do not count."""
        stood_s = sum(piece.blocked_s for piece in self.pieces) - sum(p.blocked_s for p in self.kept())
        return max(0.0, stood_s)
