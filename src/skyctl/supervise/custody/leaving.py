"""Going away from a run that is to go on: what asks for it beside an answer to Ctrl-C."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import FrameType
from typing import Any

from skyctl.launch.events import Progress, Watcher


class Leaving:
    """``wanted``: the run is to be left to a process in the background as soon as it trains.

    Args:
        wanted: from the beginning (``--detach``).
    """

    def __init__(self, *, wanted: bool = False) -> None:
        self.wanted = wanted

    def beside(self, watcher: Watcher) -> Watcher:
        """The same watcher, which answers ``detach`` when that is wanted, and takes care to be asked."""

        def step(progress: Progress) -> None:
            watcher.step(progress)
            if self.wanted:
                self._be_asked()

        def interrupted() -> str:
            answer = "detach" if self.wanted else watcher.interrupted()
            return "detach" if self.wanted else answer  # the terminal may have closed at the question

        return replace(watcher, step=step, interrupted=interrupted)

    @contextmanager
    def on(self, signals: Sequence[signal.Signals]) -> Iterator[None]:
        """While it lasts, these signals mean that. Ignored ones (nohup) stay ignored.

        A closed terminal (SIGHUP) reads no more: what is shown goes nowhere from then on.
        """

        def leave(signum: int, _frame: FrameType | None) -> None:
            self.wanted = True
            if signum == signal.SIGHUP:
                _say_no_more()
            self._be_asked()

        before: dict[int, Any] = {}
        with suppress(ValueError):  # not the main thread
            for signum in signals:
                if signal.getsignal(signum) is not signal.SIG_IGN:
                    before[signum] = signal.signal(signum, leave)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @staticmethod
    def _be_asked() -> None:
        """As Ctrl-C does, where that is an event. Before the run trains it would end it; then later."""
        if signal.getsignal(signal.SIGINT) not in (
            signal.default_int_handler,
            signal.SIG_IGN,
            signal.SIG_DFL,
        ):
            signal.raise_signal(signal.SIGINT)


def _say_no_more() -> None:
    with suppress(OSError):
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        os.close(null)
