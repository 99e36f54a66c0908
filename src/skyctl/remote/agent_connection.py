"""The launcher's connection to a running agent: threads that read, write and watch it, and notice its loss.

Nothing waits for ever: every wait goes through ``wait``, which wakes when the connection is lost. That is
when the channel ends, when what arrives is not an agent's message, or when nothing has arrived for too long
although the launcher pings.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from skyctl.agent.frames import FrameError, Message, read_frame, write_frame
from skyctl.errors import NodeError, ProtocolError, SessionGoneError, SkyctlError, UnreachableError
from skyctl.records.cluster import Node
from skyctl.remote.agent_messages import (
    AgentBye,
    AgentEnding,
    AgentFault,
    AgentMessage,
    Pong,
    parse_agent_message,
)
from skyctl.remote.awake_clock import awake_s
from skyctl.remote.base import CommandChannel

PING_INTERVAL_S = 5.0
MAX_QUEUED_BYTES = 2 << 20
SILENCE_LOOK_S = 0.5
T = TypeVar("T")
Receive = Callable[[AgentMessage, bytes], bool]
"""Handles a message; whether whoever gets it will acknowledge it (``ResumableConnection.acknowledge``)."""


class AgentConnection:
    """Frames over a channel. It works once ``start`` was called.

    Args:
        receive: called by the reading thread, holding ``changed``, with every message that is not about the
            connection itself.
        silence_s: the connection is lost when nothing has arrived for so long.

    ``lost``: why it is over, None while it is not. ``bye``: the agent's last message, once it has arrived.
    """

    has_ended = False
    """Whether the agent is known to have ended, or to belong to another launcher."""
    answer_limit_s: float | None = None
    """Seconds without a sign of life after which no answer is waited for any more; None: until it is lost."""

    def __init__(self, node: Node, channel: CommandChannel, receive: Receive, silence_s: float) -> None:
        self.node = node
        self.changed = threading.Condition()
        self.lost: SkyctlError | None = None
        self.bye: AgentBye | None = None
        self._closing = False
        self._channel: CommandChannel | None = channel
        self._receive = receive
        self._silence_s = silence_s
        self._pause_s = min(PING_INTERVAL_S, silence_s / 3)
        self._last_received_at = awake_s()
        self._queue: deque[tuple[Message, bytes | memoryview]] = deque()
        self._queued_bytes = 0
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []

    @property
    def disconnected_s(self) -> float:
        """Seconds without a channel to the agent; 0.0 while there is one."""
        return 0.0

    def start(self) -> None:
        """Begins to read, write and watch."""
        assert self._channel is not None
        self._start_channel_threads(self._channel)
        self._start_thread("watch", self._watch)

    def _start_channel_threads(self, channel: CommandChannel) -> None:
        reader = self._start_thread("read", lambda: self._read(channel))
        self._start_thread("write", lambda: self._write(channel, reader))

    def _start_thread(self, what: str, work: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=work, name=f"{what} {self.node.name}", daemon=True)
        self._threads = [*(old for old in self._threads if old.is_alive()), thread]
        thread.start()
        return thread

    @property
    def silent_s(self) -> float:
        """Seconds since anything arrived."""
        return max(0.0, awake_s() - self._last_received_at)

    @property
    def is_unheard(self) -> bool:
        """Whether the node has been silent for so long that no answer is waited for."""
        return self.answer_limit_s is not None and self.silent_s > self.answer_limit_s

    def send(self, message: Message, body: bytes | memoryview = b"") -> None:
        """Queues a frame; waits while too much is queued. Raises what the link was lost to."""
        with self.changed:
            self.wait(lambda: (self.lost is None and self._has_room()) or None, None)
            self._queue_message(message, body)

    def wait(
        self, ready: Callable[[], T | None], timeout_s: float | None, *, for_answer: bool = False
    ) -> T | None:
        """Until ``ready`` gives something (that), or the time is over (None); call it holding ``changed``.

        Args:
            for_answer: not beyond ``answer_limit_s``.

        Raises what the link was lost to, if nothing is ready by then.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        look_s = SILENCE_LOOK_S if for_answer and self.answer_limit_s is not None else None
        while (value := ready()) is None:
            if self.lost is not None:
                raise _copy_error(self.lost)
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return None
            if for_answer and self.is_unheard:
                raise self._unanswered()
            self.changed.wait(min((s for s in (left, look_s) if s is not None), default=None))
        return value

    def close(self, timeout_s: float) -> AgentBye | None:
        """Tells the agent to end everything, waits for its bye (None where none arrives), and stops."""
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
        """Ends the connection without telling the agent, which sees its input end."""
        self._stopped.set()
        self._mark_lost(None)
        if self._channel is not None:
            self._close_channel(self._channel)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(5)

    def _has_room(self) -> bool:
        return self._queued_bytes < MAX_QUEUED_BYTES

    def _queue_message(self, message: Message, body: bytes | memoryview) -> None:
        """Queues a message that somebody sends."""
        self._enqueue(message, body)

    def _close_channel(self, channel: CommandChannel) -> None:
        channel.close()

    def _enqueue(self, message: Message, body: bytes | memoryview) -> None:
        self._queue.append((message, body))
        self._queued_bytes += len(body) + 256
        self.changed.notify_all()

    def _mark_lost(self, failure: SkyctlError | None) -> None:
        with self.changed:
            if self.lost is None:
                self.lost = failure or SkyctlError(f"the session with node {self.node.name} is closed")
            self.changed.notify_all()

    def _mark_channel_lost(self, channel: CommandChannel, why: str, final: bool) -> None:
        """That channel is over; ``final``: the agent is, too."""
        self.has_ended = self.has_ended or final
        self._mark_lost(None if self._closing else self._unreachable(channel, why))

    def _read(self, channel: CommandChannel) -> None:
        why: str | None = None
        final = False
        try:
            while frame := read_frame(channel.stdout):
                self._last_received_at = awake_s()
                if reason := self._handle(parse_agent_message(frame[0]), frame[1]):
                    why, final = reason, True
        except SessionGoneError as exc:
            self.has_ended = True
            self._mark_lost(exc)
        except FrameError as exc:  # SSH lets nothing through that was changed on the way: the node said that
            self._mark_lost(
                ProtocolError(
                    f"node {self.node.name} was lost: what came is not from its agent ({exc})",
                    node=self.node.name,
                )
            )
        except (OSError, EOFError, ValueError) as exc:
            why = why or (f"the connection broke ({exc})" if str(exc) else None)
        finally:
            self._mark_channel_lost(channel, why or "the connection ended", final)

    def _handle(self, message: AgentMessage, body: bytes) -> str | None:
        """Acts on one message; returns the agent's reason to end, where it gives one."""
        if isinstance(message, AgentFault):
            return f"its agent gave up: {message.error}"
        if isinstance(message, AgentEnding):
            return f"its agent has ended: {message.why}"
        if not isinstance(message, Pong):
            with self.changed:
                if isinstance(message, AgentBye):
                    self.bye = message
                else:
                    self._deliver(message, body)
                self.changed.notify_all()
        return None

    def _deliver(self, message: AgentMessage, body: bytes) -> None:
        """A message that is not about the connection has arrived; ``changed`` is held."""
        self._receive(message, body)

    def _write(self, channel: CommandChannel, reader: threading.Thread) -> None:
        try:
            while True:
                with self.changed:
                    while not self._queue and self.lost is None and channel is self._channel:
                        self.changed.wait()
                    if not self._queue or self._stopped.is_set() or channel is not self._channel:
                        return
                    message, body = self._queue.popleft()
                    self._queued_bytes -= len(body) + 256
                    self.changed.notify_all()
                write_frame(channel.stdin, message, body)
        except (OSError, EOFError, ValueError) as exc:
            reader.join(2)  # it may know more: the agent's last message
            self._mark_channel_lost(channel, f"the connection broke ({exc})", False)

    def _watch(self) -> None:
        while not self._stopped.wait(self._pause_s):
            if self.lost is not None:
                return
            silent_s = self.silent_s
            with self.changed:
                channel = self._channel
            if channel is not None and silent_s > self._silence_s:
                self._mark_channel_lost(channel, f"nothing has come from it for {silent_s:.0f} s", False)
                self._close_channel(channel)
            elif channel is not None:
                with self.changed:
                    self._ping()

    def _ping(self) -> None:
        """Every few seconds; ``changed`` is held."""
        self._enqueue({"op": "ping"}, b"")

    def _unanswered(self) -> UnreachableError:
        return UnreachableError(
            f"node {self.node.name} has not been heard for {self.silent_s:.0f} s",
            node=self.node.name,
            hint=f"see whether the node is up: `skyctl check --limit {self.node.name}`",
        )

    def _unreachable(self, channel: CommandChannel, why: str) -> UnreachableError:
        tail = [line for line in channel.stderr_tail().splitlines() if line.strip()]
        stderr = f"; it last wrote: {tail[-1].strip()[:300]}" if tail else ""
        return UnreachableError(
            f"node {self.node.name} was lost: {why}{stderr}",
            node=self.node.name,
            hint=f"see whether the node is up: `skyctl check --limit {self.node.name}`",
        )


def _copy_error(failure: SkyctlError) -> SkyctlError:
    """A fresh copy, so that several threads can raise it, each with a traceback of its own."""
    if isinstance(failure, NodeError):
        return type(failure)(failure.message, node=failure.node, hint=failure.hint)
    return SkyctlError(failure.message, hint=failure.hint)
