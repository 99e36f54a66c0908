"""A rank's line to the launcher: its signs of life, and what it is told, in its turn."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from skyctl.agent.task_events import to_message
from skyctl.agent.task_orders import read_request
from skyctl.agent.task_runner import AgentGoneError, TaskChannel
from skyctl.errors import RunError
from skyctl.transport.planned_process_group import PEER_READY_TIMEOUT_S
from skyctl.worker.progress import Progress
from skyctl.worker.rank_environment import find_environment
from skyctl.worker.rank_events import HeartbeatEvent, RoomEvent
from skyctl.worker.rank_requests import BuildRequest, EnterRequest

T = TypeVar("T")
HEARTBEAT_S = 3.0


class LauncherLink:
    """The exchange of every rank with the launcher; heartbeats from the start until ``close``.

    Args:
        progress: what the rank is at.
    """

    def __init__(self, channel: TaskChannel, progress: Progress) -> None:
        self.channel = channel
        self._progress = progress
        self._closed = threading.Event()

    def start(self) -> None:
        """Says every ``HEARTBEAT_S`` that this rank is alive, what it is at, and whether it waits for a peer.

        In a thread of its own until the process ends. The launcher hears from a rank that computes for long,
        and not from one that is stopped or dead: that is how it knows which rank to name.
        """
        threading.Thread(target=self._send_heartbeats, daemon=True, name="heartbeat").start()

    def close(self) -> None:
        """Ends the heartbeats. Idempotent."""
        self._closed.set()

    def tell_environment(self, device: str, enter: Callable[[], None] | None = None) -> None:
        """Tells what is found for that device, and waits until the rank may build anything.

        Args:
            enter: returns once the rank has its memory on the device, which other runs may hold for hours.
                Called when the launcher says so. None: the rank does not ask for it.
        """
        self.channel.send(to_message(find_environment(device)))
        if enter is None:
            self.expect(BuildRequest)
            return
        self.expect(EnterRequest, None)
        enter()
        self.channel.send(to_message(RoomEvent(0)))
        self.expect(BuildRequest, None)

    def expect(self, cls: type[T], limit_s: float | None = PEER_READY_TIMEOUT_S) -> T:
        """Waits for the request that the launcher makes next.

        Args:
            limit_s: None: as long as it takes.

        Raises:
            RecordError: a field of it is missing, unknown or wrong.
            RunError: the launcher says anything else.
        """
        op = cls.kind  # type: ignore[attr-defined]
        received = self.channel.recv(limit_s)
        if received is None or received[0].get("op") != op:
            answer = "nothing" if received is None else repr(received[0].get("op"))
            when = "" if limit_s is None else f" within {limit_s:.0f} s"
            raise RunError(f"expected the launcher to say {op!r}{when}, it said {answer}")
        return read_request([cls], received[0])

    def _send_heartbeats(self) -> None:
        while not self._closed.wait(HEARTBEAT_S):
            try:
                self.channel.send(to_message(HeartbeatEvent(self._progress.phase, self._progress.waiting)))
            except AgentGoneError:
                return
