"""How many local steps an owner affords in a round, by its user's function: one number for all its machines.

Stages of one pipeline that made other numbers of steps would wait for each other for ever. So each sends its
number to the next one before the first step.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from skyctl.errors import WorkloadError
from skyctl.worker.rounds.stage_relay import StageRelay

Affords = Callable[[int], int]
"""Round → how many local steps an owner can make in it."""


class StepsComparison:
    """One stage's part; ``compare`` once in every round in which its owner is asked how much it affords.

    Args:
        owner: what the stage's owner is called.
        asked: local steps of a round; no stage makes more.
        relay: to the owner's other stages, of ``NUMBERS`` numbers.
    """

    NUMBERS = 2
    """The round, and the local steps to make in it."""

    def __init__(self, owner: str, asked: int, relay: StageRelay) -> None:
        self._owner, self._asked, self._relay = owner, asked, relay

    def compare(self, round_number: int, steps: int) -> None:
        """Tells the next stage how many steps this one makes, and waits for the number of the one before.

        Raises:
            WorkloadError: that is another number.
            PeerProtocolError: it is of another round, or no number of steps.
            PeerLostError: the stage before is gone.
        """
        self._relay.tell([round_number, steps])
        source = self._relay.source
        if source is None:
            return
        told_round, told = self._relay.hear()
        if told_round != round_number or not 0 <= told <= self._asked:
            raise source.protocol_error(
                f"sent {told} local steps of round {told_round}; at most {self._asked} of round "
                f"{round_number} are expected"
            )
        if told != steps:
            raise WorkloadError(
                f"owner {self._owner} affords different numbers of local steps in round {round_number}: "
                f"local_steps() comes to {steps} here, and to {told} on {source.name}",
                hint="all machines of an owner make the same steps: let local_steps(owner, round) depend on "
                "owner and round alone",
            )


def make_affords(
    function: Callable[[str, int], Any] | None,
    owner: str | None,
    name: str,
    user_errors: Callable[[str], AbstractContextManager[None]],
) -> Affords | None:
    """How many local steps an owner can make in a round, as the user's ``local_steps(owner, round)`` says.

    None where there is no owner, or no such function. Raises WorkloadError, when called, where it gives no
    whole number of at least 0; ``user_errors``: names the user's line in what it raises.
    """
    if function is None or owner is None:
        return None

    def affords(round_number: int) -> int:
        with user_errors("local_steps()"):
            found = function(owner, round_number)
        if isinstance(found, bool) or not isinstance(found, int) or found < 0:
            raise WorkloadError(
                f"{name}: local_steps({owner!r}, {round_number}) must give a whole number of at least 0, not "
                f"{found!r:.80}",
                hint="how many local steps this owner can make in that round",
            )
        return found

    return affords
