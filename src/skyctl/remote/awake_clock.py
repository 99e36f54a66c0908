"""A clock that stands still while this process is suspended.

SIGSTOP, Ctrl-Z, a closed lid, or nodes of this very machine that take every processor: meanwhile nobody could
be heard, so nobody has been silent, and no patience has been used up. Code that measures how long somebody
was silent, or how long something may still take, goes by ``awake_s`` and needs no correction of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

TICK_S = 0.25
SUSPENDED_S = 1.0
"""If two readings of the clock are further apart than this, the process did not run in between."""


class AwakeClock:
    """Seconds that this process has run. Threads may share it.

    Args:
        monotonic: the clock that does go on meanwhile.
        ticks: a thread of the clock's own reads it all the while; else only whoever asks for the time does.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic, *, ticks: bool = True) -> None:
        self._monotonic, self._ticks = monotonic, ticks
        self._lock = threading.Lock()
        self._read_at = monotonic()
        self._suspended_s = 0.0
        self._thread: threading.Thread | None = None

    def now_s(self) -> float:
        """Seconds awake since some moment in the past; only differences mean anything."""
        with self._lock:
            if self._ticks and (self._thread is None or not self._thread.is_alive()):
                self._read_at = self._monotonic()
                self._thread = threading.Thread(target=self._tick, name="awake clock", daemon=True)
                self._thread.start()
            return self._read()

    def _read(self) -> float:
        now = self._monotonic()
        away_s = now - self._read_at
        if away_s > SUSPENDED_S:
            self._suspended_s += away_s - TICK_S
        self._read_at = now
        return now - self._suspended_s

    def _tick(self) -> None:
        while True:
            time.sleep(TICK_S)
            with self._lock:
                self._read()


awake_s = AwakeClock().now_s
"""The time by this process's own clock, in seconds."""
