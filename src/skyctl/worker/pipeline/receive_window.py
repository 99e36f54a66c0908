"""How many messages a stage receives ahead. Without torch: the launcher counts their buffers as memory."""

from __future__ import annotations

DEFAULT_WINDOW = 8
"""Receives posted ahead where the plan asks for no number, in ``DEFAULT_WINDOW_BYTES`` at most."""
DEFAULT_WINDOW_BYTES = 64 * 2**20


def receive_window(asked: int, microbatches: int, message_bytes: float) -> int:
    """How many receives to post ahead.

    A plan that counts a window gets that one. Otherwise 8, or as many as fit into 64 MiB, but at least 2: a
    message only moves once its receive is posted, so a single one would wait for compute; and the notice that
    it is posted queues behind the data that travels in the other direction.

    Args:
        asked: the plan's ``receive_window``; 0: none.
        microbatches: the most there are to receive in a step.
    """
    fitting = int(DEFAULT_WINDOW_BYTES // max(message_bytes, 1.0))
    return min(microbatches, asked if asked > 0 else max(2, min(DEFAULT_WINDOW, fitting)))
