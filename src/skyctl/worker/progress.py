"""The phase that a rank is in, for its errors and for its signs of life."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Progress:
    """The phase that a rank is in, and whether it only waits for another rank.

    Attributes:
        phase: such as ``step 3, forward of microbatch 0``.
        waiting: whether it waits for a message just now; after an error it stays as it was.
    """

    def __init__(self, phase: str = "the first step") -> None:
        self.phase, self.waiting = phase, False

    @contextmanager
    def waits(self, phase: str | None = None) -> Iterator[None]:
        """Inside, the rank waits for another one; in that phase from now on (None: the same)."""
        if phase is not None:
            self.phase = phase
        self.waiting = True
        yield
        self.waiting = False
