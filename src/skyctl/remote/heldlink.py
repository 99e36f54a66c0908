"""A link that outlives its connections: ``agent/held.py`` from the launcher's side.

What we send is numbered and kept until the agent says that it has it; what comes is taken once, by its
number. When a connection is lost another is dialled in the background, and whoever waits goes on waiting.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from skyctl.agent.wire import WireError
from skyctl.errors import NodeError, SessionGoneError, SkyctlError, UnreachableError
from skyctl.records.cluster import Node
from skyctl.remote.base import Channel
from skyctl.remote.bootstrap import TAKEN_HINT
from skyctl.remote.link import QUEUE_BYTES, Link, Message

ACK_S = 1.0
ACK_FRAMES = 64
ACK_BYTES = 256 << 10
PAUSES_S = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 10.0)
OVERSLEPT_S = 5.0
LET_GO_S = 5.0
TURN_S = 2.0
_turns = threading.BoundedSemaphore(8)


class Watermark:
    """Numbers that are done with, in any order: ``value`` is the last before the first that is not."""

    def __init__(self, value: int) -> None:
        self.value = value
        self._ahead: set[int] = set()

    def done(self, number: int) -> None:
        """That one is; for one that was done before nothing changes."""
        if number > self.value:
            self._ahead.add(number)
        while self.value + 1 in self._ahead:
            self.value += 1
            self._ahead.remove(self.value)


class _Kept(NamedTuple):
    number: int
    message: Message
    body: bytes | memoryview


class Dialled(NamedTuple):
    """A new connection to the session's agent, and what that said of itself and of us."""

    channel: Channel
    hello: Message


class HeldLink(Link):
    """A session's link.

    Args:
        hello: the agent's, as it was met or taken over.
        dial: another connection, given what the agent is to be told and for how long to try; NodeErrors.
        redial_s: how long to dial before the session is lost; 0: not at all.
        manual: frames that ``receive`` says are to be reported are acknowledged when they were (``handled``).
        told: called with True when the connection is lost, with False when there is one again.
    """

    def __init__(
        self,
        node: Node,
        channel: Channel,
        receive: Callable[[Message, bytes], bool],
        silence_s: float,
        *,
        hello: Message,
        dial: Callable[[Message, float], Dialled],
        redial_s: float,
        manual: bool,
        told: Callable[[bool], None],
    ) -> None:
        super().__init__(node, channel, receive, silence_s)
        self._pause_s = min(ACK_S, self._pause_s)
        self._dial, self._redial_s, self._told = dial, redial_s, told
        self._manual = manual
        self._numbers = itertools.count(hello.get("received", 0) + 1)
        self._got = {"n": hello.get("n", 0), "r": hello.get("r", 0)}
        self._marks = {lane: Watermark(number) for lane, number in self._got.items()}
        self._acknowledged: dict[str, int] = {}
        self._arrived_bytes = 0
        self._kept: deque[_Kept] = deque()
        self._kept_bytes = 0
        self._away_at: float | None = None
        self._telling = threading.Lock()
        self._told_away = False

    def start(self) -> None:
        """Begins, with a word by which the agent knows that we know of it."""
        with self.changed:
            self._enqueue({"op": "ping"}, b"")
        super().start()

    @property
    def away_s(self) -> float:
        """How long it has been without a connection; 0.0 while it has one."""
        since = self._away_at
        return 0.0 if since is None else max(1e-9, time.monotonic() - since)

    @property
    def watermark(self) -> int:
        """Every event up to this one was handled."""
        return self._marks["n"].value

    def handled(self, number: int) -> None:
        """The owner has what that event said."""
        with self.changed:
            self._marks["n"].done(number)
            if self.watermark - self._acknowledged.get("n", 0) >= ACK_FRAMES:
                self._acknowledge()

    # --- frames

    def _has_room(self) -> bool:
        return self._kept_bytes < QUEUE_BYTES

    def _post(self, message: Message, body: bytes | memoryview) -> None:
        kept = _Kept(next(self._numbers), message, body)
        self._kept.append(kept)
        self._kept_bytes += len(body) + 256
        if self._channel is not None:
            self._enqueue({**message, "n": kept.number}, body)

    def _forget(self, number: int) -> None:
        """The agent has everything up to that."""
        while self._kept and self._kept[0].number <= number:
            self._kept_bytes -= len(self._kept.popleft().body) + 256

    def _deliver(self, message: Message, body: bytes) -> None:
        if message.get("op") == "ack":
            self._forget(message["n"])
            return
        if message.get("op") == "taken":
            raise SessionGoneError(
                f"node {self.node.name} was lost: another launcher has taken it over",
                node=self.node.name,
                hint=TAKEN_HINT,
            )
        lane = "n" if "n" in message else "r"
        number = message[lane]
        if number <= self._got[lane]:
            return
        if number != self._got[lane] + 1:
            raise WireError(f"message {number} came after message {self._got[lane]}")
        self._got[lane] = number
        reported = self._receive(message, body)
        if lane == "r" or not (reported and self._manual):
            self._marks[lane].done(number)
        self._arrived_bytes += len(body)
        late = sum(mark.value - self._acknowledged.get(key, 0) for key, mark in self._marks.items())
        if late >= ACK_FRAMES or self._arrived_bytes > ACK_BYTES:
            self._acknowledge()

    def _acknowledge(self) -> None:
        marks = {lane: mark.value for lane, mark in self._marks.items()}
        self._arrived_bytes = 0
        if marks != self._acknowledged and self._channel is not None:
            self._acknowledged = marks
            self._enqueue({"op": "ack", **marks}, b"")

    def _pulse(self) -> None:
        self._acknowledge()
        super()._pulse()

    # --- away, and back

    def _shut(self, channel: Channel) -> None:
        channel.hang_up()

    def _broke(self, channel: Channel, why: str, final: bool) -> None:
        with self.changed:
            if channel is not self._channel or self.lost is not None:
                return
            self._channel = None
            self._away_at = time.monotonic()
            failure = self._unreachable(channel, why)
            self.ended = self.ended or final or self.bye is not None
            if self.ended or not self._may_redial():
                self._lose(None if self._closing else failure)
                return
            self.changed.notify_all()
            self._begin("redial", lambda: self._redial(failure, self._redial_s or LET_GO_S))

    def _may_redial(self) -> bool:
        return (self._redial_s > 0 or self._closing) and not self._stop.is_set()

    def _tell(self) -> None:
        """Says whether there is a connection, once for each change that has lasted until now."""
        with self._telling:
            away = self._away_at is not None
            if away != self._told_away:
                self._told_away = away
                self._told(away)

    def _redial(self, failure: NodeError, limit_s: float) -> None:
        self._tell()
        began = time.monotonic()
        last = failure.message
        for pause_s in itertools.chain(PAUSES_S, itertools.repeat(PAUSES_S[-1])):
            asleep_at = time.monotonic()
            wait_s = pause_s * random.uniform(0.8, 1.2) + random.uniform(0, 0.1)  # noqa: S311 - no secret
            wait_s = min(wait_s, max(0.1, began + limit_s - asleep_at))
            if self._stop.wait(wait_s):
                return
            overslept_s = time.monotonic() - asleep_at - wait_s
            began += overslept_s if overslept_s > OVERSLEPT_S else 0.0  # we were stopped: it does not count
            try:
                if self._resumed(self._dialled(began + limit_s - time.monotonic())):
                    self._tell()
                return
            except SessionGoneError as exc:
                self.ended = True
                words = f"{failure.message}; {exc.message}"  # what was seen first, and what that was
                self._lose(SessionGoneError(words, node=self.node.name, hint=exc.hint))
                return
            except Exception as exc:  # noqa: BLE001 - whatever it is, somebody waits for the outcome
                last = exc.message if isinstance(exc, SkyctlError) else f"{type(exc).__name__}: {exc}"
            if time.monotonic() - began > limit_s:
                break
        self._lose(
            UnreachableError(
                f"{failure.message}; for {limit_s:g} s it could not be reached again: {last}",
                node=self.node.name,
                hint=failure.hint,
            )
        )

    def _dialled(self, left_s: float) -> Dialled:
        """Not all of a process's at once (a bastion's sshd has limits), but none waits for a dead node."""
        turn = _turns.acquire(timeout=TURN_S)
        try:
            with self.changed:
                words = dict(self._got)
            return self._dial(words, max(1.0, left_s))
        finally:
            if turn:
                _turns.release()

    def _resumed(self, dialled: Dialled) -> bool:
        with self.changed:
            if self._stop.is_set() or self.lost is not None:
                self._shut(dialled.channel)
                return False
            self._forget(dialled.hello["received"])
            self._queue = deque(({**kept.message, "n": kept.number}, kept.body) for kept in self._kept)
            self._queued_bytes = sum(len(body) + 256 for _, body in self._queue)
            self._acknowledged = {}
            self._channel = dialled.channel
            self._away_at = None
            self._heard_at = time.monotonic()
            if self._closing:
                self._enqueue({"op": "shutdown"}, b"")
            self._use(dialled.channel)
            self.changed.notify_all()
        return True

    # --- the end

    def close(self, timeout_s: float) -> Message | None:
        """As ``Link.close``; where the connection is away or was lost, it is dialled again to do so."""
        deadline = time.monotonic() + timeout_s
        with self.changed:
            self._closing = True
            lost, self.lost = self.lost, None if self._can_be_tried() else self.lost
            if self.lost is None and self._channel is not None:
                self._enqueue({"op": "shutdown"}, b"")
            elif lost is not None and self.lost is None:
                failure = UnreachableError(lost.message, node=self.node.name, hint=lost.hint)
                self._begin("redial", lambda: self._redial(failure, min(timeout_s / 2, LET_GO_S)))
            while self.lost is None and time.monotonic() < deadline:
                self.changed.wait(max(0.0, deadline - time.monotonic()))
            self.ended = self.ended or self.bye is not None
        self.drop()
        return self.bye

    def _can_be_tried(self) -> bool:
        """Lost with its connection only: its agent may hold there."""
        return self.lost is not None and not self.ended and not self._stop.is_set()

    def let_go(self) -> None:
        """Leaves the agent holding, with all that was sent to it."""
        deadline = time.monotonic() + LET_GO_S
        with self.changed:
            self._acknowledge()
            while (self._kept or self._queue) and self._channel is not None and time.monotonic() < deadline:
                self.changed.wait(max(0.0, deadline - time.monotonic()))
        self.ended = True
        self.drop()
