"""When an owner's part of a round is over: its pipeline's first stage decides for all stages, by its clock.

If each went by its own clock, neighbours might make different numbers of local steps, and wait for each other
for ever.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from skyctl.worker.rounds.stage_relay import StageRelay


class RoundDeadline:
    """One stage's part; ``begin`` with every round, ``is_over`` before each further local step.

    Args:
        seconds: after a round's beginning, from which on no further local step is begun.
        relay: to the owner's other stages, of ``NUMBERS`` numbers.
    """

    NUMBERS = 3
    """The round, the local steps made in it, and whether its time is over."""

    def __init__(
        self, seconds: float, relay: StageRelay, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._seconds, self._relay, self._clock = seconds, relay, clock
        self._began = 0.0

    def begin(self) -> None:
        """The round's local work begins."""
        self._began = self._clock()

    def is_over(self, round_number: int, made: int) -> bool:
        """Whether the owner stops after so many local steps; all stages but the first wait to be told.

        Args:
            made: local steps that it has made in that round.

        Raises:
            PeerProtocolError: the stage before speaks of another step.
            PeerLostError: it is gone.
        """
        source = self._relay.source
        if source is None:
            over = self._clock() - self._began >= self._seconds
        else:
            *place, told = self._relay.hear()
            if place != [round_number, made] or told not in (0, 1):
                raise source.protocol_error(
                    f"sent {[*place, told]} where it is to say whether round {round_number} is over after "
                    f"{made} local steps"
                )
            over = told == 1
        self._relay.tell([round_number, made, int(over)])
        return over
