"""A transfer that is under way, as a process group's ``send`` and ``recv`` return it."""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol

NO_TIMEOUT = timedelta(0)
"""torch's word for the default limit."""


class Work(Protocol):
    """The part of a ``dist.Work`` that ranks need.

    Ours are no subclass of torch's, whose objects take the lock of Python's threads to be freed: under TLS a
    message of 64 bytes took a quarter longer.
    """

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Returns True once the tensor is received and usable, or sent and reusable."""
