"""A line to the launcher that outlives its connections: what is lost on the way is sent again, once.

Frames either way carry numbers: ``n`` for events and for all that the launcher says, ``r`` for replies to its
requests, so that neither kind waits for the other to be acknowledged. ``ping``, ``pong``, ``ack``, ``hello``,
``resume``, ``taken``, ``shutdown``, ``ending`` and ``bye`` belong to a connection and have none. While there
is no connection the agent holds: it goes on, and keeps what it has to say.
"""

from __future__ import annotations

import os
import select
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from skyctl.agent import door
from skyctl.agent.backlog import SPOOL_BYTES, Backlog
from skyctl.agent.line import GONE, LAST_WORDS_S, Line, Message
from skyctl.agent.stream import Outbox, read_some
from skyctl.agent.wire import Parser, WireError

FILL_BYTES = 512 << 10
KNOCK_S = 30.0
KNOCKING = 4


class _Connection:
    """One connection; the first is made of standard input and output."""

    def __init__(self, in_fd: int, out_fd: int, sock: socket.socket | None, log: Path) -> None:
        self.in_fd = in_fd
        self.outbox = Outbox(out_fd)
        self.parser = Parser()
        self.acknowledged = 0
        self.since = time.monotonic()
        self._sock = sock
        self._log = log
        os.set_blocking(in_fd, False)

    def close(self) -> None:
        """Closes it. The standard streams stay open, on a log in the session's folder.

        A shell that had started us may still have them: where they are a socket, it is shut down for all.
        """
        if self._sock is not None:
            self._sock.close()
            return
        if stat.S_ISSOCK(os.fstat(self.outbox.fd).st_mode):
            with suppress(OSError), socket.socket(fileno=os.dup(self.outbox.fd)) as sock:
                sock.shutdown(socket.SHUT_RDWR)
        null = os.open(os.devnull, os.O_RDONLY)
        try:
            log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError:
            log = os.open(os.devnull, os.O_WRONLY)
        for fd, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(fd, target)
        for fd in (null, log, self.outbox.fd):
            os.close(fd)


class HeldLine(Line):
    """A session's line.

    Args:
        config: ``lease_s``, after which a silent connection is let go of; ``hold_s``, after which the agent
            ends when nobody has come; ``owner``, the secret of the launcher that may come back.
        folder: the session's.
        describe: the agent's hello.
        adopted: called when another launcher has taken the session over.
    """

    def __init__(
        self,
        config: Message,
        in_fd: int,
        out_fd: int,
        folder: Path,
        describe: Callable[[], Message],
        adopted: Callable[[], None],
    ) -> None:
        super().__init__(float(config["lease_s"]), in_fd, out_fd)
        self._hold_s = float(config["hold_s"])
        self._owner = config["owner"]
        self._describe, self._adopted = describe, adopted
        self._log = folder / "agent.log"
        self._events, self._replies = Backlog("n", folder), Backlog("r")
        self._received = 0
        self._met = False  # whether the launcher has said anything yet: before that it does not know of us
        self._connection: _Connection | None = _Connection(in_fd, out_fd, None, self._log)
        self._knocking: list[_Connection] = []
        self._listener: socket.socket | None = door.listen(folder)

    @property
    def replies(self) -> Backlog:
        """What ``Files`` writes to."""
        return self._replies

    @property
    def crowded(self) -> bool:
        """Whether lines of output are to be left out."""
        return self._events.full

    @property
    def stuffed(self) -> bool:
        """Never while nobody is there: tasks are to go on."""
        return self._connection is not None and self._events.size_bytes > SPOOL_BYTES

    @property
    def pause_s(self) -> float:
        """How long the agent may sleep."""
        return max(0.05, min(1.0, self._lease_s / 4, self._hold_s / 4))

    def push(self, message: Message, body: bytes = b"") -> int:
        """What must reach the launcher; its number."""
        return self._events.push(message, body)

    def tell(self, message: Message) -> None:
        """What is worth telling only to who is there now."""
        if self._connection is not None:
            self._connection.outbox.push(message)

    def interests(self) -> dict[int, int]:
        """Descriptors and what to wait for there."""
        wanted = {connection.in_fd: select.POLLIN for connection in self._knocking}
        if self._listener is not None:
            wanted[self._listener.fileno()] = select.POLLIN
        if self._connection is not None:
            wanted[self._connection.in_fd] = select.POLLIN
            if self._connection.outbox.size_bytes:
                fd = self._connection.outbox.fd
                wanted[fd] = wanted.get(fd, 0) | select.POLLOUT
        return wanted

    # --- who comes

    def read(self, ready: dict[int, int]) -> Iterator[tuple[Message, bytes]]:
        """The frames that have come and are the agent's to act on, each once."""
        if self._listener is not None and self._listener.fileno() in ready:
            self._admit(self._listener)
        for connection in list(self._knocking):
            if connection.in_fd in ready:
                self._hear_knock(connection)
        if self._connection is not None and self._connection.in_fd in ready:
            yield from self._frames(self._connection)

    def _admit(self, listener: socket.socket) -> None:
        sock = door.admit(listener)
        if sock is None:
            return
        self._knocking.append(_Connection(sock.fileno(), sock.fileno(), sock, self._log))
        if len(self._knocking) > KNOCKING:
            self._knocking.pop(0).close()

    def _hear_knock(self, connection: _Connection) -> None:
        data = read_some(connection.in_fd)
        if data is None:
            return
        connection.parser.feed(data)
        try:
            frame = connection.parser.next()
            if frame is None and data:
                return
            self._knocking.remove(connection)
            refusal = self._resume(connection, frame[0]) if frame else {}
        except (WireError, KeyError, TypeError, ValueError):
            refusal = {}
        except OSError as exc:
            refusal = {"error": self._unreadable(exc)}
        if refusal is not None:
            connection.outbox.push({"op": "fault", **refusal})
            with suppress(OSError):
                connection.outbox.flush()
            connection.close()

    def _resume(self, connection: _Connection, message: Message) -> Message | None:
        """Makes it the connection, or says why not."""
        number, adopts = int(message["n"]), bool(message.get("adopt"))
        if message["op"] != "resume" or (adopts and self.ending):
            return {"error": f"it is ending: {self.ending}", "gone": True}
        if not adopts and message["owner"] != self._owner:
            return {"error": "another launcher has taken it over", "taken": True}
        if number > self._events.last:
            return {"error": f"it has sent {self._events.last} messages, not {number}", "taken": True}
        self._met = True
        if adopts and self._connection is not None:
            self._connection.outbox.push({"op": "taken"})
            self.flush()
        self._leave()
        if adopts:
            self._owner = message["owner"]
            self._adopted()
            self._replies.acknowledge(self._replies.last)
            self._events.acknowledge(number)
        self._events.rewind(number)
        self._replies.rewind(self._replies.last if adopts else int(message["r"]))
        heard = {"received": self._received, "n": self._events.sent, "r": self._replies.sent}
        connection.outbox.push({"op": "hello", **self._describe(), **heard})
        if self.ending:
            connection.outbox.push({"op": "ending", "why": self.ending})
        connection.acknowledged = self._received
        self._connection = connection
        self._heard_at = time.monotonic()
        return None

    def _leave(self) -> None:
        """From here on the agent holds."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
            if not self._met:
                self.over = GONE

    # --- what they say

    def _frames(self, connection: _Connection) -> Iterator[tuple[Message, bytes]]:
        data = read_some(connection.in_fd)
        if data is None:
            return
        if not data:
            self._leave()
            return
        self._heard_at = time.monotonic()
        self._met = True
        connection.parser.feed(data)
        try:
            for message, body in connection.parser.frames():
                if self._is_new(connection, message):
                    yield message, body
        except (WireError, KeyError, TypeError):
            self._leave()

    def _is_new(self, connection: _Connection, message: Message) -> bool:
        """Whether the agent is to act on it: no word between the two ends, and not had before."""
        op = message.get("op")
        if op == "ping":
            connection.outbox.push({"op": "pong"})
        elif op == "ack":
            self._events.acknowledge(int(message["n"]))
            self._replies.acknowledge(int(message["r"]))
        elif op == "shutdown":
            return True
        elif message["n"] > self._received:
            if message["n"] != self._received + 1:
                raise WireError(f"message {message['n']} came after message {self._received}")
            self._received += 1
            return True
        return False

    # --- what is said to them

    def flush(self) -> None:
        """Writes what can be written now."""
        connection = self._connection
        if connection is None:
            return
        outbox = connection.outbox
        if connection.acknowledged != self._received:
            outbox.push({"op": "ack", "n": self._received})
            connection.acknowledged = self._received
        while self._fill(outbox):
            try:
                outbox.flush()
            except OSError:
                self._leave()
                return
            if outbox.size_bytes:
                return

    def _fill(self, outbox: Outbox) -> bool:
        """Hands over what waits, replies and events by turns; False where nothing does."""
        try:
            while outbox.size_bytes < FILL_BYTES:
                frames = [frame for frame in (self._replies.next(), self._events.next()) if frame]
                if not frames:
                    break
                for frame in frames:
                    outbox.add(frame)
        except OSError as exc:
            self._unreadable(exc)
        return outbox.size_bytes > 0

    def _unreadable(self, exc: OSError) -> str:
        self.over = f"what it kept for the launcher can't be read any more: {exc}"
        return self.over

    def watch(self) -> None:
        """Lets go of a silent connection; notes that nobody has come for too long."""
        silent_s = time.monotonic() - self._heard_at
        if self._connection is not None and silent_s > self._lease_s:
            self._leave()
        if self._connection is None and silent_s > self._hold_s:
            self.over = f"no launcher had come back to it for {self._hold_s:g} s"
        for connection in [c for c in self._knocking if time.monotonic() - c.since > KNOCK_S]:
            self._knocking.remove(connection)
            connection.close()

    # --- the end

    def drain(self) -> None:
        """Sends what is kept, for up to 2 s, while its files are still there; nobody may come any more."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for connection in self._knocking:
            connection.close()
        self._knocking.clear()
        self._send_out()

    def finish(self, message: Message) -> None:
        """The last message, to who is there."""
        if self._connection is not None:
            self._connection.outbox.push(message)
            self._send_out()

    def _send_out(self) -> None:
        deadline = time.monotonic() + LAST_WORDS_S
        self.flush()
        while self._connection is not None and self._connection.outbox.size_bytes:
            if time.monotonic() > deadline:
                return
            select.select([], [self._connection.outbox.fd], [], 0.1)
            self.flush()
