"""How many local steps an owner affords in a round, by its user's function: one number for all its machines.

Stages of one pipeline that made other numbers of steps would wait for each other for ever. So each sends its
number to the next one before the first step.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from skyctl.errors import WorkloadError
from skyctl.transport.peer_connection import Work
from skyctl.worker.stage_io import Neighbour

Affords = Callable[[int], int]
"""Round → how many local steps an owner can make in it."""


class StepsComparison:
    """One stage's part; ``compare`` once in every round in which its owner is asked how much it affords.

    Args:
        owner: what the stage's owner is called.
        asked: local steps of a round; no stage makes more.
        previous, following: the stages before and after it; None: there is none.
        tag: a tag of the connections that no other message has.
    """

    def __init__(
        self, owner: str, asked: int, previous: Neighbour | None, following: Neighbour | None, tag: int
    ) -> None:
        self._owner, self._asked, self._tag = owner, asked, tag
        self._previous, self._following = previous, following
        self._sent: tuple[torch.Tensor, Work] | None = None

    def compare(self, round_number: int, steps: int) -> None:
        """Tells the next stage how many steps this one makes, and waits for the number of the one before.

        Raises:
            WorkloadError: that is another number.
            PeerProtocolError: it is of another round, or no number of steps.
            PeerLostError: the stage before is gone.
        """
        if self._following is not None:
            if self._sent is not None:
                self._sent[1].wait()  # received long since, in the round before
            message = torch.tensor([round_number, steps], dtype=torch.int64)
            self._sent = message, self._following.connection.send(message, self._tag)
        if self._previous is None:
            return
        connection = self._previous.connection
        buffer = torch.empty(2, dtype=torch.int64)
        connection.recv(buffer, self._tag).wait()
        told_round, told = buffer.tolist()
        if told_round != round_number or not 0 <= told <= self._asked:
            raise connection.protocol_error(
                f"sent {told} local steps of round {told_round}; at most {self._asked} of round "
                f"{round_number} are expected"
            )
        if told != steps:
            raise WorkloadError(
                f"owner {self._owner} affords different numbers of local steps in round {round_number}: "
                f"local_steps() comes to {steps} here, and to {told} on {connection.peer}",
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
