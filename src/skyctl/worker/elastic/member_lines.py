"""A rank's lines to all other members: messages both ways, and signs of life that say who is there.

A line is lost where its connection ends, or where nothing has come over it for longer than is usual. The
usual time is measured: the median of the gaps between signs of life, and their spread; and a step's time on
top, since to wait for so long costs no more than to go on without that rank. A process that ends ends its
connection, so only one that stands still or is cut off is found by its silence.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from skyctl.agent.message_fields import FieldError, read_fields, write_fields
from skyctl.errors import RunError
from skyctl.schedule.unusual_times import unusual_after_s
from skyctl.transport.transfer_errors import PeerProtocolError
from skyctl.transport.work import Work
from skyctl.worker.member_messages import MEMBER_MESSAGES, MemberMessage, StatePart
from skyctl.worker.peer import Peer

BEAT_S = 0.1
"""From one sign of life to the next."""
KEPT_GAPS = 64
LEAST_GAPS = 8
"""Before so many gaps were seen nothing is known to be unusual."""
LEAST_SPREAD_S = BEAT_S / 2
"""Signs that came evenly say nothing of a machine that is about to be busy: a rank whose quota of CPU time is
used up, or whose core is taken, is silent for some 100 ms, and would be put out for that."""
LEAVE_S = 1.0
"""For what was sent before this rank leaves: those that are left may need it to agree without it."""
MOST_BYTES = 1 << 20
"""Of a message, and of the bytes that may follow it."""
_WAITING_BEATS = 2
"""So many signs of life wait for a line at most; further ones would say nothing new."""
_SIZE_TAG, _TEXT_TAG, _DATA_TAG = 16, 17, 18
_KINDS = {cls.kind: cls for cls in MEMBER_MESSAGES}


class Arrivals:
    """When signs of life have come over one line, and after which silence it counts as lost. Pure.

    Args:
        now: a time in seconds, as all others here.
    """

    def __init__(self, now: float) -> None:
        self.heard_at = self._sign_at = now
        self._gaps: deque[float] = deque(maxlen=KEPT_GAPS)

    def note(self, now: float, *, is_message: bool = False) -> None:
        """A sign of life has come, or a message: these come in bursts, and say nothing of what is usual."""
        self.heard_at = now
        if not is_message:
            self._gaps.append(now - self._sign_at)
            self._sign_at = now

    def excuse(self, seconds: float) -> None:
        """This rank has stood still itself for so long, and could hear nobody."""
        self.heard_at += seconds
        self._sign_at += seconds

    def limit_s(self, step_s: float | None) -> float | None:
        """The silence after which the line is lost; None: not known yet.

        Args:
            step_s: a step's usual time; None: not known yet.
        """
        gaps = list(self._gaps)  # another thread adds to them
        if step_s is None or len(gaps) < LEAST_GAPS:
            return None
        return unusual_after_s(gaps, LEAST_SPREAD_S) + step_s


class MemberLines:
    """The lines of one rank: ``start``, then ``send``; ``close`` in any case.

    Args:
        peers: by rank, over connections that carry nothing else.
        received: called with each message and its sender, in a thread of the line's; None: a sign of life. A
            ``StatePart`` has its bytes with it.
        lost: called once with each rank whose line is lost, in some thread.
        step_s: gives a step's usual time in seconds; None: not known yet.
    """

    def __init__(
        self,
        peers: Mapping[int, Peer],
        received: Callable[[int, MemberMessage | None, bytes], None],
        lost: Callable[[int], None],
        step_s: Callable[[], float | None],
    ) -> None:
        self._peers, self._received, self._tell_lost, self._step_s = dict(peers), received, lost, step_s
        self._arrivals: dict[int, Arrivals] = {}
        self._lost: set[int] = set()
        self._locks = {rank: threading.Lock() for rank in peers}
        self._beats: dict[int, deque[Work]] = {rank: deque() for rank in peers}
        self._is_closed = threading.Event()

    def start(self) -> None:
        """Begins to listen, and to give signs of life."""
        for rank in list(self._peers):
            self._hear(rank)
        self._in_thread(self._beat, "signs of life")

    def add(self, rank: int, peer: Peer) -> None:
        """One line more, to a rank that has joined; it is used from now on."""
        self._locks[rank], self._beats[rank] = threading.Lock(), deque()
        self._peers[rank] = peer
        self._hear(rank)

    def _hear(self, rank: int) -> None:
        self._arrivals[rank] = Arrivals(time.monotonic())
        self._in_thread(partial(self._listen, rank), f"hears rank {rank}")

    def send(self, rank: int, message: MemberMessage) -> None:
        """Starts sending; a line that is lost takes it and drops it."""
        self._put(rank, _text_of(message))

    def send_part(self, rank: int, part: StatePart, data: bytes) -> bool:
        """Sends a message and its bytes, and waits until they have left; whether they have."""
        work = self._put(rank, _text_of(part), data)
        if work is None:
            return False
        try:
            work.wait()
        except RunError:
            return False
        return True

    def stop_missing(self) -> None:
        """From now on no line counts as lost, and no signs of life are given."""
        self._is_closed.set()

    def close(self) -> None:
        """Ends all lines, once what was sent has left, or after ``LEAVE_S``. Idempotent."""
        self._is_closed.set()
        deadline = time.monotonic() + LEAVE_S
        for rank in self._peers.keys() - self._lost:
            with self._locks[rank]:
                waiting = list(self._beats[rank])
            for work in waiting:
                left_s = deadline - time.monotonic()
                if left_s > 0:
                    with suppress(RunError):
                        work.wait(timedelta(seconds=left_s))
        for peer in list(self._peers.values()):
            with suppress(RunError):
                peer.close()

    @property
    def lost(self) -> frozenset[int]:
        """The ranks whose lines are lost."""
        return frozenset(self._lost)

    def lose(self, rank: int) -> None:
        """Ends one line: nothing is heard from that rank any more."""
        if rank in self._lost or self._is_closed.is_set():
            return
        self._lost.add(rank)
        with suppress(RunError):
            self._peers[rank].close()
        self._tell_lost(rank)

    # --- threads

    def _in_thread(self, run: Callable[[], None], name: str) -> None:
        threading.Thread(target=run, daemon=True, name=name).start()

    def _listen(self, rank: int) -> None:
        peer = self._peers[rank]
        try:
            while True:
                size = torch.zeros(1, dtype=torch.int64)
                peer.recv(size, _SIZE_TAG).wait()
                nbytes = int(size.item())
                if not 0 <= nbytes <= MOST_BYTES:
                    raise peer.protocol_error(f"announced a message of {nbytes} bytes")
                text = torch.empty(nbytes, dtype=torch.uint8)
                if nbytes:
                    peer.recv(text, _TEXT_TAG).wait()
                message = read_message(peer, bytes(text.tolist())) if nbytes else None
                data = bytearray(message.bytes if isinstance(message, StatePart) else 0)
                if data:
                    peer.recv(torch.frombuffer(data, dtype=torch.uint8), _DATA_TAG).wait()
                self._arrivals[rank].note(time.monotonic(), is_message=nbytes > 0)
                self._received(rank, message, bytes(data))
        except RunError as exc:
            if isinstance(exc, PeerProtocolError):  # nobody else says why that rank is left out
                print(f"{exc.message}: it is left out", file=sys.stderr, flush=True)
        finally:  # whatever ends it: a line that nobody listens on is none
            self.lose(rank)

    def _beat(self) -> None:
        """Gives signs of life, and finds lines that are silent for too long."""
        ticked_at = time.monotonic()
        while not self._is_closed.wait(BEAT_S):
            now = time.monotonic()
            late_s = now - ticked_at - BEAT_S
            ticked_at = now
            for rank, arrivals in list(self._arrivals.items()):
                if rank in self._lost:
                    continue
                if late_s > BEAT_S:
                    arrivals.excuse(late_s)
                limit_s = arrivals.limit_s(self._step_s())
                if limit_s is not None and now - arrivals.heard_at > limit_s:
                    self.lose(rank)
                else:
                    self._put(rank, b"")

    def _put(self, rank: int, text: bytes, data: bytes = b"") -> Work | None:
        """Starts sending; returns what ends last, or None where nothing is sent."""
        if rank in self._lost or self._is_closed.is_set():
            return None
        peer, waiting = self._peers[rank], self._beats[rank]
        with self._locks[rank]:
            while waiting and _is_done(waiting[0]):
                waiting.popleft()
            if not text and len(waiting) >= _WAITING_BEATS:
                return None
            try:
                work = peer.send(torch.tensor([len(text)], dtype=torch.int64), _SIZE_TAG)
                if text:
                    work = peer.send(torch.frombuffer(bytearray(text), dtype=torch.uint8), _TEXT_TAG)
                if data:
                    work = peer.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), _DATA_TAG)
            except RunError:
                return None  # whoever listens finds it lost
            waiting.append(work)
            return work


def _text_of(message: MemberMessage) -> bytes:
    return json.dumps({"kind": message.kind} | write_fields(message)).encode()


def read_message(peer: Peer, text: bytes) -> MemberMessage:
    """A message as its record. Raises PeerProtocolError where it is none, and names what is wrong."""
    try:
        fields: Any = json.loads(text)
        cls = _KINDS[fields.pop("kind")]
        return cls(**read_fields(cls, fields, exact=True))
    except (ValueError, KeyError, TypeError, AttributeError, FieldError) as exc:
        raise peer.protocol_error(f"sent what is no message of a member: {str(exc)[:200]}") from None


def _is_done(work: Work) -> bool:
    """Whether a transfer is over, without waiting for it."""
    transfer = getattr(work, "_work", None)
    return transfer is None or transfer.is_over()
