"""A connection that is dialled again when it is lost: the launcher's side of a resumable session.

Messages to the agent are numbered and kept until it acknowledges them; what arrives is handled once, by its
number. When a channel is lost another is dialled in the background, and whoever waits goes on waiting.
``agent/launcher_connection.py`` is the other side.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from skyctl.agent.frames import FrameError, Message
from skyctl.errors import NodeError, SessionGoneError, SkyctlError, UnreachableError
from skyctl.records.cluster import Node
from skyctl.remote.agent_connection import MAX_QUEUED_BYTES, SILENCE_LOOK_S, AgentConnection, Receive
from skyctl.remote.agent_messages import (
    EVENTS,
    REPLIES,
    Acknowledgement,
    AgentBye,
    AgentHello,
    AgentMessage,
    NumberedMessage,
    SequenceSet,
    SessionTaken,
)
from skyctl.remote.awake_clock import awake_s
from skyctl.remote.base import CommandChannel
from skyctl.remote.bootstrap import SESSION_TAKEN_HINT

ACK_INTERVAL_S = 1.0
ACK_FRAMES = 64
ACK_BYTES = 256 << 10
REDIAL_PAUSES_S = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 10.0)
DETACH_TIMEOUT_S = 5.0
DIAL_TURN_TIMEOUT_S = 2.0
UNHEARD_S = 10.0
"""A caller that asks something of a node that has been silent for so long gets an error. The connection is
kept for as long as it is to be dialled again, since what runs there goes on. It is pinged every second."""
_dial_turns = threading.BoundedSemaphore(8)


class _UnacknowledgedFrame(NamedTuple):
    number: int
    message: Message
    body: bytes | memoryview


class DialledChannel(NamedTuple):
    """A new channel to the session's agent, and the hello that came over it."""

    channel: CommandChannel
    hello: AgentHello


class ResumableConnection(AgentConnection):
    """A session's connection.

    Args:
        hello: what the agent said when it was started or taken over.
        dial: gives another channel, told what has arrived by sequence and how long it may try. Raises
            NodeError.
        redial_s: how long to dial before the session is lost; 0: not at all.
        manual_ack: messages of which ``receive`` says that their receiver will acknowledge them are
            acknowledged to the agent only then.
        on_change: called with True when the connection is lost, with False when there is one again.
    """

    answer_limit_s = UNHEARD_S

    def __init__(
        self,
        node: Node,
        channel: CommandChannel,
        receive: Receive,
        silence_s: float,
        *,
        hello: AgentHello,
        dial: Callable[[dict[str, int], float], DialledChannel],
        redial_s: float,
        manual_ack: bool,
        on_change: Callable[[bool], None],
    ) -> None:
        super().__init__(node, channel, receive, silence_s)
        self._pause_s = min(ACK_INTERVAL_S, self._pause_s)
        self._dial, self._redial_s, self._on_change = dial, redial_s, on_change
        self._manual_ack = manual_ack
        self._numbers = itertools.count(hello.received + 1)
        self._arrived = {EVENTS: hello.event_number, REPLIES: hello.reply_number}
        self._handled = {sequence: SequenceSet(number) for sequence, number in self._arrived.items()}
        self._acknowledged: dict[str, int] = {}
        self._arrived_bytes = 0
        self._unacknowledged: deque[_UnacknowledgedFrame] = deque()
        self._unacknowledged_bytes = 0
        self._disconnected_at: float | None = None
        self._on_change_lock = threading.Lock()
        self._reported_disconnected = False

    def start(self) -> None:
        """Begins, with a ping that tells the agent that its hello has arrived."""
        with self.changed:
            self._enqueue({"op": "ping"}, b"")
        super().start()

    @property
    def disconnected_s(self) -> float:
        """Seconds without a channel to the agent; 0.0 while there is one."""
        since = self._disconnected_at
        return 0.0 if since is None else max(1e-9, awake_s() - since)

    @property
    def watermark(self) -> int:
        """Every event up to this number was handled."""
        return self._handled[EVENTS].upto

    def acknowledge(self, number: int) -> None:
        """The event with that number was handled; the agent need not keep it."""
        with self.changed:
            self._handled[EVENTS].add(number)
            if self.watermark - self._acknowledged.get(EVENTS, 0) >= ACK_FRAMES:
                self._acknowledge()

    # --- frames

    def _has_room(self) -> bool:
        return self._unacknowledged_bytes < MAX_QUEUED_BYTES

    def _queue_message(self, message: Message, body: bytes | memoryview) -> None:
        frame = _UnacknowledgedFrame(next(self._numbers), message, body)
        self._unacknowledged.append(frame)
        self._unacknowledged_bytes += len(body) + 256
        if self._channel is not None:
            self._enqueue({**message, EVENTS: frame.number}, body)

    def _drop_acknowledged(self, number: int) -> None:
        """The agent has every message up to that number."""
        while self._unacknowledged and self._unacknowledged[0].number <= number:
            self._unacknowledged_bytes -= len(self._unacknowledged.popleft().body) + 256

    def _deliver(self, message: AgentMessage, body: bytes) -> None:
        if isinstance(message, Acknowledgement):
            self._drop_acknowledged(message.number)
            return
        if isinstance(message, SessionTaken):
            raise SessionGoneError(
                f"node {self.node.name} was lost: another launcher has taken it over",
                node=self.node.name,
                hint=SESSION_TAKEN_HINT,
            )
        if not isinstance(message, NumberedMessage):
            raise FrameError(f"{type(message).__name__} is not expected now")
        sequence, number = message.sequence, message.number
        if number <= self._arrived[sequence]:
            return
        if number != self._arrived[sequence] + 1:
            raise FrameError(f"message {number} came after message {self._arrived[sequence]}")
        self._arrived[sequence] = number
        needs_ack = self._receive(message, body)
        if not (needs_ack and self._manual_ack):
            self._handled[sequence].add(number)
        self._arrived_bytes += len(body)
        late = sum(handled.upto - self._acknowledged.get(key, 0) for key, handled in self._handled.items())
        if late >= ACK_FRAMES or self._arrived_bytes > ACK_BYTES:
            self._acknowledge()

    def _acknowledge(self) -> None:
        marks = {sequence: handled.upto for sequence, handled in self._handled.items()}
        self._arrived_bytes = 0
        if marks != self._acknowledged and self._channel is not None:
            self._acknowledged = marks
            self._enqueue({"op": "ack", **marks}, b"")

    def _ping(self) -> None:
        self._acknowledge()
        super()._ping()

    # --- away, and back

    def _close_channel(self, channel: CommandChannel) -> None:
        channel.detach()

    def _mark_channel_lost(self, channel: CommandChannel, why: str, final: bool) -> None:
        with self.changed:
            if channel is not self._channel or self.lost is not None:
                return
            self._channel = None
            self._disconnected_at = awake_s()
            failure = self._unreachable(channel, why)
            self.has_ended = self.has_ended or final or self.bye is not None
            if self.has_ended or not self._may_reconnect():
                self._mark_lost(None if self._closing else failure)
                return
            self.changed.notify_all()
            self._begin_reconnecting(failure, self._redial_s or DETACH_TIMEOUT_S)

    def _begin_reconnecting(self, failure: NodeError, limit_s: float) -> None:
        """In a thread that ``drop`` does not wait for: a dial may take long, and hangs up by itself."""
        thread = threading.Thread(
            target=self._reconnect, args=(failure, limit_s), name=f"reconnect {self.node.name}", daemon=True
        )
        thread.start()

    def _may_reconnect(self) -> bool:
        return (self._redial_s > 0 or self._closing) and not self._stopped.is_set()

    def _report_change(self) -> None:
        """Reports whether there is a connection, once for each change that still holds."""
        with self._on_change_lock:
            disconnected = self._disconnected_at is not None
            if disconnected != self._reported_disconnected:
                self._reported_disconnected = disconnected
                self._on_change(disconnected)

    def _reconnect(self, failure: NodeError, limit_s: float) -> None:
        self._report_change()
        deadline = awake_s() + limit_s
        last = failure.message
        for pause_s in itertools.chain(REDIAL_PAUSES_S, itertools.repeat(REDIAL_PAUSES_S[-1])):
            wait_s = pause_s * random.uniform(0.8, 1.2) + random.uniform(0, 0.1)  # noqa: S311 - no secret
            wait_s = min(wait_s, max(0.1, deadline - awake_s()))
            if self._stopped.wait(wait_s):
                return
            try:
                if self._resumed(self._dialled(deadline - awake_s())):
                    self._report_change()
                return
            except SessionGoneError as exc:
                self.has_ended = True
                text = f"{failure.message}; {exc.message}"  # what was noticed first, and what it was
                self._mark_lost(SessionGoneError(text, node=self.node.name, hint=exc.hint))
                return
            except Exception as exc:  # noqa: BLE001 - whatever it is, somebody waits for the outcome
                last = exc.message if isinstance(exc, SkyctlError) else f"{type(exc).__name__}: {exc}"
            if awake_s() > deadline:
                break
        self._mark_lost(
            UnreachableError(
                f"{failure.message}; for {limit_s:g} s it could not be reached again: {last}",
                node=self.node.name,
                hint=failure.hint,
            )
        )

    def _dialled(self, left_s: float) -> DialledChannel:
        """Dials, not with all sessions at once (sshd has limits), but waiting only briefly for the others."""
        turn = _dial_turns.acquire(timeout=DIAL_TURN_TIMEOUT_S)
        try:
            with self.changed:
                arrived = dict(self._arrived)
            return self._dial(arrived, max(1.0, left_s))
        finally:
            if turn:
                _dial_turns.release()

    def _resumed(self, dialled: DialledChannel) -> bool:
        with self.changed:
            if self._stopped.is_set() or self.lost is not None:
                self._close_channel(dialled.channel)
                return False
            self._drop_acknowledged(dialled.hello.received)
            self._queue = deque(
                ({**frame.message, EVENTS: frame.number}, frame.body) for frame in self._unacknowledged
            )
            self._queued_bytes = sum(len(body) + 256 for _, body in self._queue)
            self._acknowledged = {}
            self._channel = dialled.channel
            self._disconnected_at = None
            self._last_received_at = awake_s()
            if self._closing:
                self._enqueue({"op": "shutdown"}, b"")
            self._start_channel_threads(dialled.channel)
            self.changed.notify_all()
        return True

    # --- the end

    def close(self, timeout_s: float) -> AgentBye | None:
        """As ``AgentConnection.close``; where the channel was lost, or is silent, it is dialled again for it.

        An agent that could not be dialled again within seconds ends by itself.
        """
        with self.changed:
            self._closing = True
            deadline = time.monotonic() + timeout_s
            lost, self.lost = self.lost, None if self._can_be_tried() else self.lost
            if self.lost is None and self._channel is not None:
                self._enqueue({"op": "shutdown"}, b"")
            elif lost is not None and self.lost is None:
                failure = UnreachableError(lost.message, node=self.node.name, hint=lost.hint)
                self._begin_reconnecting(failure, min(timeout_s / 2, DETACH_TIMEOUT_S))
            while self.lost is None and (left_s := deadline - time.monotonic()) > 0:
                if self.is_unheard:  # at the beginning, or since then
                    deadline = min(deadline, time.monotonic() + DETACH_TIMEOUT_S)
                    if (channel := self._channel) is not None:
                        self._mark_channel_lost(channel, f"nothing has come for {self.silent_s:.0f} s", False)
                        self._close_channel(channel)
                self.changed.wait(min(left_s, SILENCE_LOOK_S))
            self.has_ended = self.has_ended or self.bye is not None
        self.drop()
        return self.bye

    def _can_be_tried(self) -> bool:
        """Whether only the connection was lost, and the agent may still run."""
        return self.lost is not None and not self.has_ended and not self._stopped.is_set()

    def detach(self) -> None:
        """Leaves the agent running, once it has everything that was sent to it."""
        deadline = time.monotonic() + DETACH_TIMEOUT_S
        with self.changed:
            self._acknowledge()
            while (
                (self._unacknowledged or self._queue)
                and self._channel is not None
                and time.monotonic() < deadline
            ):
                self.changed.wait(max(0.0, deadline - time.monotonic()))
        self.has_ended = True
        self.drop()
