"""Something started on many nodes, heard through one queue, ended together.

Work that is slow or may hang (a dial, a task's events) happens in one daemon thread for each member of the
group. The owner reads all of it in its own thread, in the order in which it came. Threads are never waited
for: one that hangs in a system call must not keep a command from ending.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from skyctl.errors import SkyctlError

SIGNAL_CHECK_INTERVAL_S = 1.0
"""At least so often a waiting owner sees whether a signal came."""
K = TypeVar("K")
Message = dict[str, Any]


class FollowedTask(Protocol):
    """The part of a task that the group needs (``remote_task.RemoteTask``)."""

    def recv(self, timeout_s: float | None = None) -> tuple[Message, bytes] | None:
        """The next event; None when there will be no more."""

    def kill(self) -> None:
        """Ends the task on its node."""


@dataclass(frozen=True)
class GroupEvent(Generic[K]):
    """Something that one member said, or its end.

    ``value``: a task's message, or what the member's work returned. ``error``: what ended it instead.
    ``ended``: nothing more comes of it. ``task``: the task that said it; None for work.
    """

    key: K
    value: Any = None
    error: BaseException | None = None
    ended: bool = False
    task: Any = None


class TaskGroup(Generic[K]):
    """Members are added by any thread and read by one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._events: queue.SimpleQueue[GroupEvent[K]] = queue.SimpleQueue()
        self._tasks: list[FollowedTask] = []

    def run(self, key: K, work: Callable[[], Any]) -> None:
        """Does the work in a thread of its own; its one event is what it returned or raised."""

        def to_its_end() -> None:
            try:
                self._events.put(GroupEvent(key, work(), ended=True))
            except BaseException as exc:  # noqa: BLE001 - handed to the reader's thread
                self._events.put(GroupEvent(key, error=exc, ended=True))

        self._thread(key, to_its_end)

    def wait_outcome(self) -> tuple[K, Any]:
        """Waits for the next member whose work has ended: who it is, and its result or SkyctlError.

        Any other exception of the work is raised here.
        """
        event = None
        while event is None:  # in turns: a signal that another thread took does not end a wait without limit
            event = self.receive(SIGNAL_CHECK_INTERVAL_S)
        if event.error is not None and not isinstance(event.error, SkyctlError):
            raise event.error
        return event.key, event.value if event.error is None else event.error

    def follow(self, key: K, task: FollowedTask) -> None:
        """Brings everything that the task says here, until it has ended or its node is lost."""

        def to_its_end() -> None:
            try:
                while (got := task.recv(None)) is not None:
                    self._events.put(GroupEvent(key, got[0], task=task))
            except (SkyctlError, EOFError, OSError) as exc:
                self._events.put(GroupEvent(key, error=exc, ended=True, task=task))
            else:
                self._events.put(GroupEvent(key, ended=True, task=task))

        self._tasks.append(task)
        self._thread(key, to_its_end)

    def post(self, key: K, value: Any = None) -> None:
        """Adds an event of the owner's own; a signal handler may do so."""
        self._events.put(GroupEvent(key, value))

    def receive(self, timeout_s: float | None = None) -> GroupEvent[K] | None:
        """The next event; None where nothing comes in time (0: nothing is there)."""
        with suppress(queue.Empty):
            return self._events.get(timeout=timeout_s) if timeout_s != 0 else self._events.get_nowait()
        return None

    def receive_all(self, timeout_s: float | None = None) -> Iterator[GroupEvent[K]]:
        """Waits for the next event, then gives all that are there by now; none if nothing comes in time."""
        for _ in range(max(1, self._events.qsize())):
            event = self.receive(timeout_s)
            if event is None:
                return
            timeout_s = 0
            yield event

    def kill_all(self) -> None:
        """Ends every task on its node, without waiting; errors of dead connections don't matter here."""
        for task in self._tasks:
            with suppress(SkyctlError, OSError, EOFError):
                task.kill()

    def _thread(self, key: K, target: Callable[[], None]) -> None:
        name = f"{self._name} {key}" if isinstance(key, str | int) else self._name
        threading.Thread(target=target, name=name, daemon=True).start()
