"""The terminal that a command was started in, which may be closed while the command goes on."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def ignoring_closed_terminal() -> Iterator[None]:
    """A write to a terminal that was closed sends this and all further output nowhere.

    The system says so with EIO, perhaps before SIGHUP is handled, which says what is to become of the work.
    """
    try:
        yield
    except OSError as exc:
        if exc.errno != errno.EIO:
            raise
        silence_output()


def silence_output() -> None:
    """Sends what is printed from now on nowhere, and gives stdin nothing to read."""
    with suppress(OSError):
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        os.close(null)
