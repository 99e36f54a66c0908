"""The launcher's side of one task on a node."""

from __future__ import annotations

from collections import deque
from typing import Any

from skyctl.remote.link import Link, Message

LOG_EVENTS = 10_000


class Task:
    """One process on a node: messages both ways. Made by ``Session.task``.

    Args:
        manual: every event carries its ``seq``, and no line of output is left out: ``Session.handled`` says
            when one has been dealt with.
    """

    def __init__(self, link: Link, number: int, name: str, *, manual: bool = False) -> None:
        self.name = name
        self.number = number
        self.node = link.node
        self.returncode: int | None = None
        self.signal: str | None = None
        self._link = link
        self._manual = manual
        self._events: deque[tuple[Message, bytes]] = deque()
        self._logs = 0
        self._dropped = 0
        self._gone = False
        self._given_up = False

    @property
    def ended(self) -> bool:
        """Whether it has ended there, with all it had started."""
        return self._gone

    @property
    def done(self) -> bool:
        """Whether it has ended and every event of it has been received."""
        with self._link.changed:
            return self._gone and not self._events

    def send(self, message: Message, body: bytes = b"") -> None:
        """Sends it a message (dropped where it has ended). Raises UnreachableError when the node is lost."""
        self._link.send({"op": "send", "task": self.number, "message": message}, body)

    def recv(self, timeout_s: float | None = None) -> tuple[Message, bytes] | None:
        """The next event; None when the time is over, or it is ``done``, or was discarded.

        Raises:
            UnreachableError: the node is lost (after the events that had come before).
        """
        with self._link.changed:
            self._link.wait(lambda: True if self._events or self._gone or self._given_up else None, timeout_s)
            if not self._events:
                return None
            event = self._events.popleft()
            self._logs -= event[0].get("event") == "log"
            return event

    def kill(self) -> None:
        """Ends it there: TERM, and KILL after a grace, for it and all it has started. Does not wait."""
        if not self._gone:
            self._link.send({"op": "kill", "task": self.number})

    def take(self, message: Message, body: bytes, seq: int = 0) -> bool:
        """An event has come; whether it will be reported. The reader calls it, holding the condition."""
        if self._manual:
            self._events.append(({**message, "seq": seq}, body))
            return True
        if message.get("event") == "log":
            if self._logs >= LOG_EVENTS:
                self._dropped += 1
                return False
            if self._dropped:
                note = f"[skyctl: {self._dropped} lines left out here, they came faster than they were read]"
                self._dropped = 0
                self._events.append(({"event": "log", "text": note}, b""))
                self._logs += 1
            self._logs += 1
        self._events.append((message, body))
        return False

    def drop(self) -> list[int]:
        """Nobody asks any more: forgets what has come; their numbers, where it is to be reported."""
        self._given_up = True
        left = [message["seq"] for message, _ in self._events if "seq" in message]
        self._events.clear()
        return left

    def end(self, message: dict[str, Any]) -> None:
        """It is gone. The reader calls it, holding the link's condition."""
        self._gone = True
        self.returncode, self.signal = message.get("returncode"), message.get("signal")
