"""A running agent's frames both ways: threads that read, write and watch, and one place that notes the end.

Nothing waits for ever: every wait goes through ``wait``, which wakes when the link is lost. A link is lost
when the connection ends, when what comes is no frame, or when nothing has come for too long although we ask.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from skyctl.agent.wire import WireError, read_frame, write_frame
from skyctl.errors import NodeError, SessionGoneError, SkyctlError, UnreachableError
from skyctl.records.cluster import Node
from skyctl.remote.base import Channel

PING_S = 5.0
QUEUE_BYTES = 2 << 20
Message = dict[str, Any]
T = TypeVar("T")


class Link:
    """Frames over a channel. It works once ``start`` was called.

    Args:
        receive: called by the reading thread, holding ``changed``, with every frame not the link's own. It
            says whether whoever takes the frame is to report it (``HeldLink``).
        silence_s: lost when nothing has come for so long.
    """

    ended = False
    """Whether the agent is known to have ended, or to be another's."""

    def __init__(
        self, node: Node, channel: Channel, receive: Callable[[Message, bytes], bool], silence_s: float
    ) -> None:
        self.node = node
        self.changed = threading.Condition()
        self.lost: SkyctlError | None = None
        self.bye: Message | None = None
        self._closing = False
        self._channel: Channel | None = channel
        self._receive = receive
        self._silence_s = silence_s
        self._pause_s = min(PING_S, silence_s / 3)
        self._heard_at = time.monotonic()
        self._queue: deque[tuple[Message, bytes | memoryview]] = deque()
        self._queued_bytes = 0
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    @property
    def away_s(self) -> float:
        """How long it has been without a connection."""
        return 0.0

    def start(self) -> None:
        """Begins to read, write and watch."""
        assert self._channel is not None
        self._use(self._channel)
        self._begin("watch", self._watch)

    def _use(self, channel: Channel) -> None:
        reader = self._begin("read", lambda: self._read(channel))
        self._begin("write", lambda: self._write(channel, reader))

    def _begin(self, what: str, work: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=work, name=f"{what} {self.node.name}", daemon=True)
        self._threads = [*(old for old in self._threads if old.is_alive()), thread]
        thread.start()
        return thread

    @property
    def silent_s(self) -> float:
        """Seconds since anything came."""
        return max(0.0, time.monotonic() - self._heard_at)

    def send(self, message: Message, body: bytes | memoryview = b"") -> None:
        """Queues a frame; waits while too much is queued. Raises what the link was lost to."""
        with self.changed:
            self.wait(lambda: (self.lost is None and self._has_room()) or None, None)
            self._post(message, body)

    def wait(self, ready: Callable[[], T | None], timeout_s: float | None) -> T | None:
        """Until ``ready`` gives something (that), or the time is over (None); call it holding ``changed``.

        Raises what the link was lost to, if nothing is ready by then.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (value := ready()) is None:
            if self.lost is not None:
                raise _again(self.lost)
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return None
            self.changed.wait(left)
        return value

    def close(self, timeout_s: float) -> Message | None:
        """Tells the agent to end everything, waits for its bye (that, or None), and ends the threads."""
        with self.changed:
            self._closing = True
            if self.lost is None:
                self._enqueue({"op": "shutdown"}, b"")
                deadline = time.monotonic() + timeout_s
                while self.lost is None and time.monotonic() < deadline:
                    self.changed.wait(max(0.0, deadline - time.monotonic()))
        self.drop()
        return self.bye

    def drop(self) -> None:
        """Ends it without a word; the agent sees its input end."""
        self._stop.set()
        self._lose(None)
        if self._channel is not None:
            self._shut(self._channel)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(5)

    def _has_room(self) -> bool:
        return self._queued_bytes < QUEUE_BYTES

    def _post(self, message: Message, body: bytes | memoryview) -> None:
        """Queues what somebody sends."""
        self._enqueue(message, body)

    def _shut(self, channel: Channel) -> None:
        channel.close()

    def _enqueue(self, message: Message, body: bytes | memoryview) -> None:
        self._queue.append((message, body))
        self._queued_bytes += len(body) + 256
        self.changed.notify_all()

    def _lose(self, failure: SkyctlError | None) -> None:
        with self.changed:
            if self.lost is None:
                self.lost = failure or SkyctlError(f"the session with node {self.node.name} is closed")
            self.changed.notify_all()

    def _broke(self, channel: Channel, why: str, final: bool) -> None:
        """That connection is over; ``final``: the agent is, too."""
        self.ended = self.ended or final
        self._lose(None if self._closing else self._unreachable(channel, why))

    def _read(self, channel: Channel) -> None:
        why: str | None = None
        final = False
        try:
            while frame := read_frame(channel.stdout):
                self._heard_at = time.monotonic()
                if reason := self._take(*frame):
                    why, final = reason, True
        except SessionGoneError as exc:
            self.ended = True
            self._lose(exc)
        except (WireError, KeyError, TypeError, AttributeError) as exc:
            why = f"what came is not from its agent ({exc})"
        except (OSError, EOFError, ValueError) as exc:
            why = why or (f"the connection broke ({exc})" if str(exc) else None)
        finally:
            self._broke(channel, why or "the connection ended", final)

    def _take(self, message: Message, body: bytes) -> str | None:
        """One frame; the agent's reason to end, where it is that."""
        op = message.get("op")
        if op == "fault":
            return f"its agent gave up: {message.get('error')}"
        if op == "ending":
            return f"its agent has ended: {message['why']}"
        if op != "pong":
            with self.changed:
                if op == "bye":
                    self.bye = message
                else:
                    self._deliver(message, body)
                self.changed.notify_all()
        return None

    def _deliver(self, message: Message, body: bytes) -> None:
        """A frame that is not about the connection has come; ``changed`` is held."""
        self._receive(message, body)

    def _write(self, channel: Channel, reader: threading.Thread) -> None:
        try:
            while True:
                with self.changed:
                    while not self._queue and self.lost is None and channel is self._channel:
                        self.changed.wait()
                    if not self._queue or self._stop.is_set() or channel is not self._channel:
                        return
                    message, body = self._queue.popleft()
                    self._queued_bytes -= len(body) + 256
                    self.changed.notify_all()
                write_frame(channel.stdin, message, body)
        except (OSError, EOFError, ValueError) as exc:
            reader.join(2)  # it may know more: what the agent said last
            self._broke(channel, f"the connection broke ({exc})", False)

    def _watch(self) -> None:
        pause_s = self._pause_s
        asleep_at = time.monotonic()
        while not self._stop.wait(pause_s):
            if self.lost is not None:
                return
            self._heard_at += max(0.0, time.monotonic() - asleep_at - 2 * pause_s)  # we did not listen either
            asleep_at = time.monotonic()
            silent_s = time.monotonic() - self._heard_at
            with self.changed:
                channel = self._channel
            if channel is not None and silent_s > self._silence_s:
                self._broke(channel, f"nothing has come from it for {silent_s:.0f} s", False)
                self._shut(channel)
            elif channel is not None:
                with self.changed:
                    self._pulse()

    def _pulse(self) -> None:
        """Every few seconds; ``changed`` is held."""
        self._enqueue({"op": "ping"}, b"")

    def _unreachable(self, channel: Channel, why: str) -> UnreachableError:
        tail = [line for line in channel.stderr_tail().splitlines() if line.strip()]
        said = f"; it last wrote: {tail[-1].strip()[:300]}" if tail else ""
        return UnreachableError(
            f"node {self.node.name} was lost: {why}{said}",
            node=self.node.name,
            hint=f"see whether the node is up: `skyctl check --limit {self.node.name}`",
        )


def _again(failure: SkyctlError) -> SkyctlError:
    """A fresh copy, so that several threads can raise it, each with a traceback of its own."""
    if isinstance(failure, NodeError):
        return type(failure)(failure.message, node=failure.node, hint=failure.hint)
    return SkyctlError(failure.message, hint=failure.hint)
