"""The process that gives a device's turns: ``python -m skyctl.turns.turn_server LISTENER_FD FOLDER``.

One thread plays ``TurnArbiter`` with what jobs send over the folder's socket. A job whose connection ends has
no turn from then on. A job that sends what is no request, or what it can't ask for now, is disconnected.

After an arbiter has died, its jobs come to the next one, and some hold turns. So one whose first job returns
gives no turn for ``RETURN_S``.

A job that is late with its turn keeps its ephemeral bytes. Others go on beside it only if there is room for
those next to their own, and else wait for it: memory that is not there would end somebody.
"""

from __future__ import annotations

import fcntl
import math
import os
import selectors
import socket
import sys
import time
from pathlib import Path

from skyctl.agent.frames import FrameError, FrameParser, FrameWriteBuffer, read_available
from skyctl.agent.task_orders import read_request, write_request
from skyctl.agent.unix_socket import SOCKET_NAME, accept_same_user
from skyctl.errors import SkyctlError
from skyctl.turns import turn_messages as messages
from skyctl.turns.device_folder import LOCK_NAME
from skyctl.turns.memory_admission import MemoryAdmission, MemoryNeed
from skyctl.turns.turn_arbiter import TurnArbiter, TurnError
from skyctl.turns.turn_policy import PACK, TurnPolicy, parse_turns

RETURN_S = 1.0
"""Seconds in which the jobs of a dead arbiter come back before anybody gets a turn or room."""
LOOK_S = 0.1
"""So often an arbiter without jobs looks whether it may end."""
MAX_LISTED_JOBS = 1000


class _Connection:
    """A job, or somebody who only asks.

    Attributes:
        number: the job's.
        is_told: that its turn is wanted.
        room: what it was told last of its memory; None: nothing yet.
        wants_room: it has asked for memory.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.parser = FrameParser()
        self.outgoing = FrameWriteBuffer(sock.fileno())
        self.number: int | None = None
        self.is_told = False
        self.room: messages.RoomMessage | None = None
        self.wants_room = False

    def send(self, answer: messages.Answer) -> None:
        self.outgoing.push(write_request(answer))


class TurnServer:
    """Serves one device's jobs until there are none."""

    def __init__(self, listener: socket.socket, folder: Path) -> None:
        self._listener = listener
        self._folder = folder
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._connections: set[_Connection] = set()
        self._by_number: dict[int, _Connection] = {}
        self._arbiter: TurnArbiter | None = None
        self._room = MemoryAdmission(0.0)
        self._device = ""
        self._first: tuple[TurnPolicy, str] = (TurnPolicy(""), "")
        self._grants_from = 0.0

    def run(self) -> None:
        """Serves; returns when the last job is gone."""
        while self._by_number or not self._end():
            for key, _ in self._selector.select(self._timeout_s()):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.data in self._connections:
                    self._read(key.data)
            self._grant()
            while self._flush():
                self._grant()

    def _timeout_s(self) -> float | None:
        if not self._by_number:
            return LOOK_S
        assert self._arbiter is not None
        now = time.monotonic()
        times = (self._grants_from, *(job.late_at for job in self._arbiter.holders))
        next_at = min((at for at in times if at > now), default=math.inf)
        return None if next_at == math.inf else next_at - now

    def _end(self) -> bool:
        """Stops listening where nobody is just coming; False where somebody is."""
        fd = os.open(self._folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if any(key.fileobj is self._listener for key, _ in self._selector.select(0)) or self._connections:
                return False
            (self._folder / SOCKET_NAME).unlink(missing_ok=True)
            self._listener.close()
            return True
        except BlockingIOError:
            return False
        finally:
            os.close(fd)

    def _accept(self) -> None:
        sock = accept_same_user(self._listener)
        if sock is not None:
            connection = _Connection(sock)
            self._connections.add(connection)
            self._selector.register(sock, selectors.EVENT_READ, connection)

    def _drop(self, connection: _Connection) -> None:
        self._connections.discard(connection)
        self._selector.unregister(connection.sock)
        connection.sock.close()
        if connection.number is not None:
            del self._by_number[connection.number]
            assert self._arbiter is not None
            self._arbiter.close(connection.number)
            self._room.leave(str(connection.number))

    def _read(self, connection: _Connection) -> None:
        data = read_available(connection.sock.fileno())
        if data is None:
            return
        try:
            connection.parser.feed(data)
            for message, _ in connection.parser.frames():
                self._follow(connection, read_request(messages.REQUESTS, message))
        except (FrameError, TurnError, SkyctlError):
            data = b""
        if not data:
            self._drop(connection)

    def _follow(self, connection: _Connection, request: messages.Request) -> None:
        now = time.monotonic()
        if isinstance(request, messages.ListJobsRequest):
            connection.send(self._listed(now))
            return
        if isinstance(request, messages.OpenRequest):
            self._open(connection, request, now)
            return
        number, arbiter = connection.number, self._arbiter
        if number is None or arbiter is None:
            raise TurnError("a request of who is no job here")
        if isinstance(request, messages.AskRequest):
            arbiter.ask(number, now)
        elif isinstance(request, messages.RoomRequest):
            self._enter(connection, number, request)
        elif isinstance(request, messages.TellRequest):
            arbiter.tell(number, request.remaining_s, request.demand)
        else:
            arbiter.use(number, request.used_s, request.count)
            if isinstance(request, messages.GiveRequest):
                arbiter.give(number, now)
                self._room.take_back(str(number))
                if request.asks:
                    arbiter.ask(number, now)

    def _open(self, connection: _Connection, request: messages.OpenRequest, now: float) -> None:
        if connection.number is not None:
            raise TurnError(f"job {request.job} opens again")
        policy = parse_turns(request.turns)
        if not self._by_number:
            self._arbiter = TurnArbiter(policy.kind)
            self._room = MemoryAdmission(0.0, lanes_are_shared=policy.kind != PACK)
            self._device, self._first = request.device, (policy, request.job)
            self._grants_from = now + (RETURN_S if request.returns else 0.0)
        first, job = self._first
        if policy.kind != first.kind:
            connection.send(messages.RefusedMessage(str(first), job))
            return
        assert self._arbiter is not None
        connection.number = self._arbiter.open(
            now,
            request.job,
            priority=policy.priority,
            used_s=request.used_s,
            waited_s=request.waited_s,
            turns=request.count,
            holds=request.holds,
        )
        self._by_number[connection.number] = connection
        connection.send(messages.OpenedMessage())

    def _enter(self, connection: _Connection, number: int, request: messages.RoomRequest) -> None:
        need = MemoryNeed(request.persistent_bytes, request.ephemeral_bytes)
        self._room.capacity_bytes = max(self._room.capacity_bytes, request.capacity_bytes)
        connection.wants_room, connection.room = True, None
        if request.holds:
            self._room.keep(str(number), need)
        else:
            self._room.ask(str(number), need)

    def _tell_of_room(self) -> None:
        """Lets in whose memory fits, and tells each job of its own, where that has changed."""
        if time.monotonic() < self._grants_from:
            return
        self._room.let_in()
        for number, connection in self._by_number.items():
            room = messages.RoomMessage(self._room.place(str(number)), self._room.is_tight)
            if connection.wants_room and connection.room != room:
                connection.room = room
                connection.send(room)

    def _grant(self) -> None:
        """Gives turns, and tells their holders once that somebody else waits."""
        self._tell_of_room()
        arbiter, now = self._arbiter, time.monotonic()
        if arbiter is None or now < self._grants_from:
            return
        for number in arbiter.late(now):
            if self._room.put_aside(str(number)):
                arbiter.put_aside(number, now)
        granted = arbiter.grant(now)
        wanted = bool(arbiter.waiting)
        for number in granted:
            connection = self._by_number[number]
            connection.is_told = wanted
            connection.send(messages.GrantMessage(wanted))
        for holder in arbiter.holders if wanted else ():
            connection = self._by_number[holder.number]
            if not connection.is_told:
                connection.is_told = True
                connection.send(messages.WantedMessage())

    def _flush(self) -> bool:
        """Sends what is to be sent; True where that has shown that somebody is gone, or does not read."""
        left = []
        for connection in self._connections:
            try:
                connection.outgoing.flush()
            except OSError:
                left.append(connection)
                continue
            if connection.outgoing.unsent_bytes:
                left.append(connection)
        for connection in left:
            self._drop(connection)
        return bool(left)

    def _listed(self, now: float) -> messages.ListedMessage:
        jobs = [] if self._arbiter is None else list(self._arbiter.jobs.values())[:MAX_LISTED_JOBS]
        return messages.ListedMessage(
            self._device,
            str(self._first[0]),
            tuple(
                messages.ListedJob(
                    job.name,
                    job.holds,
                    job.used_s,
                    job.waited_s,
                    job.turns,
                    job.longest_wait_s,
                    None if job.asked_at is None else now - job.asked_at,
                    self._room.place(str(job.number)),
                    job.late_at <= now,
                )
                for job in jobs
            ),
        )


def main(arguments: list[str]) -> None:
    """Serves in a process of its own; the one that was started ends at once."""
    listener = socket.socket(fileno=int(arguments[0]))
    listener.setblocking(False)
    if os.fork():
        os._exit(0)
    os.setsid()
    fcntl.flock(sys.stdout.fileno(), fcntl.LOCK_EX)  # its log: `skyctl clean` leaves the folder alone
    TurnServer(listener, Path(arguments[1])).run()


if __name__ == "__main__":
    main(sys.argv[1:])
