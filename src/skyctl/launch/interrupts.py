"""Ctrl-C as an event, so that it cuts nothing in two."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interrupts_go_to(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """While it lasts, SIGINT calls ``handler``; only in the main thread, and where it is Python's own."""
    ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if ours:
        signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
