"""A job's side of a shared device: ``with turns.turn():`` around whatever computes there.

Nothing else is done within a turn. In particular no turn is held while the job waits for another machine, so
turns add no edge to the graph of who waits for whom but this: who asks waits for who computes. A computation
ends by itself, so such an edge never closes a cycle, and jobs that could not deadlock alone can't together.

A turn that has ended is kept, and the next one costs no message, while nobody else waits. When somebody does,
a thread gives it back as soon as the job has had nothing to compute for ``IDLE_S``; it needs nothing of
the job's own thread, which may wait for another machine meanwhile. A job that always computes asks anew after
each slice. When the arbiter dies, the thread finds or starts another one, and the turn that is held goes on.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from skyctl.agent.frames import FrameError, FrameParser, encode_frame
from skyctl.agent.task_orders import read_request, write_request
from skyctl.agent.unix_socket import connect_in_folder
from skyctl.errors import MismatchError, RunError, SkyctlError
from skyctl.turns import turn_messages as messages
from skyctl.turns.device_folder import TURNS_FOLDER, connect_to_arbiter, device_folder
from skyctl.turns.memory_admission import MemoryAdmission, MemoryNeed
from skyctl.turns.turn_policy import IDLE_S, SLICE_S, parse_turns

TELL_EVERY_S = 1.0
ANSWER_S = 60.0
LIST_ANSWER_S = 2.0
MAX_STARTS = 5
"""So many arbiters in a row may die before they answer."""


class NoTurns:
    """The device is not shared by turns: nothing is asked, nothing is held."""

    def turn(self) -> contextlib.AbstractContextManager[None]:
        """Computes at once."""
        return _NO_TURN

    def tell(self, *, remaining_s: float | None = None, demand: float | None = None) -> None:
        """Nobody wants to know."""

    def enter(
        self,
        need: MemoryNeed,
        capacity_bytes: float,
        told: Callable[[int], None],
        release: Callable[[], None] = lambda: None,
    ) -> None:
        """Enters at once: without turns nobody counts the memory of jobs. As of ``DeviceTurns.enter``."""

    def tell_progress(self, done: int, total: int) -> None:
        """Nobody wants to know."""

    def close(self) -> None:
        """There is nothing to give back."""


_NO_TURN = contextlib.nullcontext()
NO_TURNS = NoTurns()


class DeviceTurns:
    """The turns of one job on one device; made by ``open_turns``. One thread computes.

    Raises:
        MismatchError: the device's jobs take turns by another policy.
        RunError: no arbiter can be started.
    """

    def __init__(self, turns: str, device: str, job_id: str, cache: Path) -> None:
        self._policy, self._device, self._job = str(parse_turns(turns)), device, job_id
        self._folder = device_folder(cache, device)
        self._changed = threading.Condition()
        self._used_s = self._waited_s = 0.0
        self._count = 0
        self._holds = self._computes = self._is_wanted = self._asks = self._is_closed = False
        self._granted_at = self._idle_since = self._told_at = self._started_at = 0.0
        self._told = messages.TellRequest()
        self._room: messages.RoomRequest | None = None
        self._place: int | None = None
        self._is_tight = False
        self._release: Callable[[], None] = lambda: None
        self._error: Exception | None = None
        self._parser = FrameParser()
        self._sock = self._join(returns=False)
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._thread = threading.Thread(target=self._serve, name="turns", daemon=True)
        self._thread.start()

    def turn(self) -> DeviceTurns:
        """``with turns.turn():`` waits for the turn and has it to the block's end.

        Raises:
            MismatchError, RunError: the arbiter has died and no other one takes this job.
        """
        return self

    def __enter__(self) -> None:
        with self._changed:
            assert not self._computes, "a turn within a turn"
            now = time.monotonic()
            self._computes = True  # before the turn is there: the thread must not take it for an idle one
            try:
                if not self._holds:
                    self._ask(now, messages.AskRequest())
                elif self._is_wanted and now - self._granted_at >= SLICE_S:
                    self._holds = False
                    self._free()
                    self._ask(now, messages.GiveRequest(self._used_s, self._count, asks=True))
            except BaseException:
                self._computes = False
                raise
            self._started_at = time.monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._idle_since = now = time.monotonic()
            self._used_s += now - self._started_at
            self._count += 1
            self._computes = False
            if self._is_wanted:
                self._wake.send(b"w")
            elif now - self._told_at >= TELL_EVERY_S:
                self._told_at = now
                self._send(messages.UseRequest(self._used_s, self._count))

    def tell(self, *, remaining_s: float | None = None, demand: float | None = None) -> None:
        """Says how many device seconds the job needs yet (srtf), and which part of it, 0 to 1 (pack)."""
        with self._changed:
            told = messages.TellRequest(
                self._told.remaining_s if remaining_s is None else remaining_s,
                self._told.demand if demand is None else demand,
            )
            if told != self._told:
                self._told = told
                self._send(told)

    def enter(
        self,
        need: MemoryNeed,
        capacity_bytes: float,
        told: Callable[[int], None],
        release: Callable[[], None] = lambda: None,
    ) -> None:
        """Waits until the device has room for the job's memory. It has that until it closes.

        Args:
            capacity_bytes: what the device has for all jobs together.
            told: called with the job's place among those that wait, from 1, whenever that is lower.
            release: gives freed memory back to the device. Called before the turn is given back where jobs
                fit only if none keeps its ephemeral bytes; by another thread than the one that computes.

        Raises:
            MismatchError: the device could not hold the job even alone; or as ``turn``.
            RunError: as ``turn``.
        """
        alone = MemoryAdmission(capacity_bytes)
        alone.ask(self._job, need)  # raises what the arbiter would have no words for
        with self._changed:
            self._release = release
            self._room = messages.RoomRequest(need.persistent_bytes, need.ephemeral_bytes, capacity_bytes)
            self._send(self._room)
            place = None
            while place != 0:
                self._check()
                if self._place is None or (place is not None and self._place >= place):
                    self._changed.wait()
                elif place := self._place:
                    told(place)

    def tell_progress(self, done: int, total: int) -> None:
        """``tell`` of what is left to do, by the device seconds that was done so far has taken."""
        with self._changed:
            used_s = self._used_s
        self.tell(remaining_s=used_s / done * (total - done))

    def close(self) -> None:
        """Gives back what is held; the job is no longer one of the device's."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._wake.send(b"w")
        self._thread.join()
        for sock in (self._sock, self._wake, self._woken):
            sock.close()

    def _ask(self, now: float, request: messages.Request) -> None:
        """Asks and waits until the turn is there."""
        if not self._asks:  # an interrupted wait has asked already
            self._asks = True
            self._send(request)
        while not self._holds:
            self._check()
            self._changed.wait()
        self._waited_s += time.monotonic() - now

    def _free(self) -> None:
        """Before another job's turn: gives freed memory back where that job needs it."""
        if self._is_tight:
            self._release()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._is_closed:
            raise RunError(f"job {self._job} asks for a turn on {self._device} after it closed")

    def _send(self, request: messages.Request) -> None:
        """Sends it; where the arbiter is gone, the thread says the same to the next one."""
        with contextlib.suppress(OSError):
            self._sock.sendall(encode_frame(write_request(request)))

    def _serve(self) -> None:
        """The thread: takes what the arbiter says, gives idle turns back, finds another arbiter."""
        while True:
            with self._changed:
                if self._is_closed:
                    return
                timeout = self._give_if_idle()
            readable, _, _ = select.select([self._sock, self._woken], [], [], timeout)
            if self._woken in readable:
                self._woken.recv(4096)
            if self._sock in readable and not self._receive():
                try:
                    self._return()
                except (SkyctlError, OSError) as exc:
                    with self._changed:
                        self._error = exc
                        self._changed.notify_all()
                    return

    def _give_if_idle(self) -> float | None:
        """Gives the turn back where it is wanted and not used; else in how many seconds to look again."""
        if not self._holds or not self._is_wanted or self._computes:
            return None
        left_s = self._idle_since + IDLE_S - time.monotonic()
        if left_s > 0.0:
            return left_s
        self._holds = False
        self._free()
        self._send(messages.GiveRequest(self._used_s, self._count))
        return None

    def _receive(self) -> bool:
        """Takes what has come; False where the arbiter is gone, or is none."""
        try:
            data = self._sock.recv(1 << 16)
        except OSError:
            data = b""
        self._parser.feed(data)
        with self._changed:
            try:
                for message, _ in self._parser.frames():
                    answer = read_request(messages.SIGNALS, message)
                    if isinstance(answer, messages.WantedMessage):
                        self._is_wanted = True
                        continue
                    if isinstance(answer, messages.RoomMessage):
                        self._place, self._is_tight = answer.place, answer.is_tight
                        self._changed.notify_all()
                        continue
                    if not self._asks:
                        return False
                    self._asks, self._holds, self._is_wanted = False, True, answer.wanted
                    self._granted_at = self._idle_since = time.monotonic()
                    self._changed.notify_all()
            except (FrameError, SkyctlError):
                return False
        return bool(data)

    def _return(self) -> None:
        """Goes on with another arbiter: holds what was held, asks for what was asked for."""
        self._sock.close()
        with self._changed:
            self._parser = FrameParser()
            self._is_wanted = False
            self._sock = self._join(returns=True)
            if self._room is not None:
                self._send(replace(self._room, holds=self._place == 0))
            if self._told != messages.TellRequest():
                self._send(self._told)
            if self._asks:
                self._send(messages.AskRequest())

    def _join(self, *, returns: bool) -> socket.socket:
        """A connection to an arbiter that knows this job."""
        for _ in range(MAX_STARTS):
            sock = connect_to_arbiter(self._folder)
            try:
                sock.settimeout(ANSWER_S)
                request = messages.OpenRequest(
                    self._device,
                    self._job,
                    self._policy,
                    self._used_s,
                    self._waited_s,
                    self._count,
                    returns,
                    self._holds,
                )
                sock.sendall(encode_frame(write_request(request)))
                answer = _read_answer(sock, self._parser)
            except OSError:
                answer = None
            except BaseException:
                sock.close()
                raise
            if isinstance(answer, messages.OpenedMessage):
                sock.settimeout(None)
                return sock
            sock.close()
            if isinstance(answer, messages.RefusedMessage):
                raise MismatchError(
                    f"device {self._device} is shared by turns {answer.turns!r}, as job {answer.job} asked; "
                    f"job {self._job} asks for {self._policy!r}",
                    hint=f"--turns {answer.turns}, or wait until the other jobs have ended: skyctl ps",
                )
        raise RunError(
            f"{MAX_STARTS} processes in a row that were to give turns on {self._device} died at once"
        )


def open_turns(turns: str | None, *, device: str, job_id: str, cache: Path) -> DeviceTurns | NoTurns:
    """The job's turns on a device; with None the device is not shared by turns.

    Args:
        turns: the policy, as the option's text.
        device: a name of it that all jobs on it use.
        job_id: the run's: under fair its ranks on the device count as one.
        cache: the node's cache folder.

    Raises:
        InputError: there is no such policy.
        MismatchError: the device's jobs take turns by another one; both are named.
        RunError: no arbiter can be started.
        OSError: the system refuses.
    """
    return NO_TURNS if turns is None else DeviceTurns(turns, device, job_id, cache)


def list_shared_devices(cache: Path) -> list[messages.ListedMessage]:
    """The node's shared devices and the jobs that share each now, by device. Raises OSError."""
    return sorted(_ask_arbiters(cache), key=lambda listed: listed.device)


def _ask_arbiters(cache: Path) -> Iterator[messages.ListedMessage]:
    for folder in (cache / TURNS_FOLDER).glob("*"):
        try:
            with connect_in_folder(folder) as sock:
                sock.settimeout(LIST_ANSWER_S)
                sock.sendall(encode_frame(write_request(messages.ListJobsRequest())))
                answer = _read_answer(sock, FrameParser())
        except (OSError, FrameError, SkyctlError):
            continue  # it has ended, or is about to
        if isinstance(answer, messages.ListedMessage) and answer.jobs:
            yield answer


def _read_answer(sock: socket.socket, parser: FrameParser) -> messages.Answer | None:
    """The next message; None where the connection ends before it. Raises FrameError, OSError, RecordError."""
    while (frame := parser.next_frame()) is None:
        data = sock.recv(1 << 16)
        if not data:
            return None
        parser.feed(data)
    return read_request(messages.ANSWERS, frame[0])
