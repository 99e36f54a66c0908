"""A few whole numbers that each stage of a pipeline tells the next one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from skyctl.transport.work import Work
from skyctl.worker.peer import Peer


class StageRelay:
    """One stage's part: it hears the stage before it, and tells the one after it.

    Args:
        previous, following: the stages before and after it; None: there is none.
        tag: a tag that no other message between two stages has.
        size: how many numbers a message has.
    """

    def __init__(self, previous: Peer | None, following: Peer | None, tag: int, size: int) -> None:
        self._previous, self._following = previous, following
        self._tag, self._size = tag, size
        self._sent: tuple[torch.Tensor, Work] | None = None

    @property
    def source(self) -> Peer | None:
        """The stage before; None on the first one."""
        return self._previous

    def hear(self) -> list[int]:
        """The numbers that the stage before has told; waits for them. Only where there is such a stage.

        Raises:
            PeerLostError: it is gone.
        """
        assert self._previous is not None
        buffer = torch.empty(self._size, dtype=torch.int64)
        self._previous.recv(buffer, self._tag).wait()
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
        self._sent = message, self._following.send(message, self._tag)
