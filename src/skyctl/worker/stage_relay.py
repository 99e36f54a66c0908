"""A few whole numbers that each stage of a pipeline tells the next one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from skyctl.transport.peer_connection import PeerConnection, Work
from skyctl.worker.stage_io import Neighbour


class StageRelay:
    """One stage's part: it hears the stage before it, and tells the one after it.

    Args:
        previous, following: the stages before and after it; None: there is none.
        tag: a tag of the connections that no other message has.
        size: how many numbers a message has.
    """

    def __init__(self, previous: Neighbour | None, following: Neighbour | None, tag: int, size: int) -> None:
        self._previous, self._following = previous, following
        self._tag, self._size = tag, size
        self._sent: tuple[torch.Tensor, Work] | None = None

    @property
    def source(self) -> PeerConnection | None:
        """The connection to the stage before; None on the first one."""
        return None if self._previous is None else self._previous.connection

    def hear(self) -> list[int]:
        """The numbers that the stage before has told; waits for them. Only where there is such a stage.

        Raises:
            PeerLostError: it is gone.
        """
        assert self._previous is not None
        buffer = torch.empty(self._size, dtype=torch.int64)
        self._previous.connection.recv(buffer, self._tag).wait()
        return buffer.tolist()

    def tell(self, numbers: Sequence[int]) -> None:
        """Tells the next stage, if there is one, and does not wait until it hears.

        Raises:
            PeerLostError: it is gone.
        """
        if self._following is None:
            return
        if self._sent is not None:
            self._sent[1].wait()  # heard long since: other messages have been answered after it
        message = torch.tensor(numbers, dtype=torch.int64)
        self._sent = message, self._following.connection.send(message, self._tag)
