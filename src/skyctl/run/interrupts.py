"""Ctrl-C while the ranks of an attempt are watched: it comes in line with their events."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from skyctl.remote.task_group import TaskGroup
from skyctl.run.callbacks import Detached, RunCallbacks

INTERRUPT = -1
"""Ctrl-C's place among the ranks whose events come."""


class Interrupts:
    """Ctrl-C as an event of a group's, and the question to whoever watches.

    Args:
        tasks: by rank; an interrupt comes with the key ``INTERRUPT``.
    """

    def __init__(self, tasks: TaskGroup[int], callbacks: RunCallbacks) -> None:
        self._tasks, self._callbacks = tasks, callbacks
        self._asking = False

    @contextmanager
    def as_events(self) -> Iterator[None]:
        """While it lasts, SIGINT is an event; only in the main thread, and where it is Python's own."""
        ours = (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        )
        if ours:
            signal.signal(signal.SIGINT, self._post)
        try:
            yield
        finally:
            if ours:
                signal.signal(signal.SIGINT, signal.default_int_handler)

    def ask(self) -> None:
        """Asks what is to become of the run; another Ctrl-C meanwhile ends the question.

        Raises:
            KeyboardInterrupt: it is to end (``Detached``: it goes on without this process).
        """
        self._asking = True
        try:
            answer = self._callbacks.interrupted()
        finally:
            self._asking = False
        if answer != "go on":
            raise Detached if answer == "detach" else KeyboardInterrupt

    def _post(self, signum: int, frame: Any) -> None:
        if self._asking:
            signal.default_int_handler(signum, frame)
        self._tasks.post(INTERRUPT)
