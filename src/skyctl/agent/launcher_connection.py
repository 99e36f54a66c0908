"""The agent's connection to its launcher: one stream, or one after the other without gap or repeat.

The first stream is standard input and what was standard output. In a resumable session frames carry numbers,
so that what is lost on the way is sent again, once: ``n`` for events and for everything that the launcher
sends, ``r`` for replies to its requests, so that neither kind waits for the other to be acknowledged.
``ping``, ``pong``, ``ack``, ``hello``, ``resume``, ``taken``, ``shutdown``, ``ending`` and ``bye`` are about
one stream and have none. While no launcher is connected the agent goes on, and keeps its messages.
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

from skyctl.agent import unix_socket
from skyctl.agent.frames import FrameError, FrameParser, FrameWriteBuffer, Message, read_available
from skyctl.agent.retransmission_queue import MAX_SPOOL_BYTES, RetransmissionQueue

MAX_UNSENT_BYTES = 4 << 20
MAX_UNSENT_LOG_BYTES = 2 << 20
FINAL_FLUSH_S = 2.0
WRITE_AHEAD_BYTES = 512 << 10
RESUME_REQUEST_TIMEOUT_S = 30.0
MAX_PENDING_STREAMS = 4
LAUNCHER_GONE = "the launcher is gone"


class _LauncherStream:
    """One stream of frames both ways; the first is made of standard input and output."""

    def __init__(self, in_fd: int, out_fd: int, sock: socket.socket | None, log: Path) -> None:
        self.in_fd = in_fd
        self.outgoing = FrameWriteBuffer(out_fd)
        self.parser = FrameParser()
        self.acknowledged = 0
        self.since = time.monotonic()
        self._sock = sock
        self._log_path = log
        os.set_blocking(in_fd, False)

    def close(self) -> None:
        """Closes the stream. The standard streams are then a log file in the session's folder.

        A shell that has started the agent may still have them open: a socket is shut down for all.
        """
        if self._sock is not None:
            self._sock.close()
            return
        if stat.S_ISSOCK(os.fstat(self.outgoing.fd).st_mode):
            with suppress(OSError), socket.socket(fileno=os.dup(self.outgoing.fd)) as sock:
                sock.shutdown(socket.SHUT_RDWR)
        null = os.open(os.devnull, os.O_RDONLY)
        try:
            log = os.open(self._log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError:
            log = os.open(os.devnull, os.O_WRONLY)
        for fd, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(fd, target)
        for fd in (null, log, self.outgoing.fd):
            os.close(fd)


class LauncherConnection:
    """A connection whose end is the end of the agent.

    ``failure``: why the agent is to end because of the connection, None while it is not. ``announced_end``:
    why the agent is ending, None while it is not; the agent sets it. ``max_sleep_s``: how long it may wait in
    one poll.
    """

    def __init__(self, lease_s: float, in_fd: int, out_fd: int, log_path: Path = Path(os.devnull)) -> None:
        self.failure: str | None = None
        self.announced_end: str | None = None
        self.max_sleep_s = max(0.05, min(1.0, lease_s / 4))
        self._lease_s = lease_s
        self._last_received_at = time.monotonic()
        self._stream: _LauncherStream | None = _LauncherStream(in_fd, out_fd, None, log_path)
        self._is_listening = True
        self._is_launcher_known = False  # before the launcher has said anything it does not know of us

    @property
    def replies(self) -> FrameWriteBuffer | RetransmissionQueue:
        """The buffer that the file server puts its replies into."""
        assert self._stream is not None
        return self._stream.outgoing

    @property
    def _unsent_bytes(self) -> int:
        return 0 if self._stream is None else self._stream.outgoing.unsent_bytes

    @property
    def drops_output(self) -> bool:
        """Whether lines of output are to be dropped, since too much is unsent or kept."""
        return self._unsent_bytes > MAX_UNSENT_LOG_BYTES

    @property
    def pauses_tasks(self) -> bool:
        """Whether tasks are to wait before they send more: never while no launcher is connected."""
        return self._unsent_bytes >= MAX_UNSENT_BYTES

    def send(self, message: Message, body: bytes = b"") -> int:
        """Queues a message that must reach the launcher; its number, 0 where it has none."""
        self.send_if_connected(message, body)
        return 0

    def send_if_connected(self, message: Message, body: bytes = b"") -> None:
        """Queues a message that matters only to a launcher that is connected now."""
        if self._stream is not None:
            self._stream.outgoing.push(message, body)

    def poll_events(self) -> dict[int, int]:
        """The events to poll for: descriptor → event mask."""
        stream = self._stream
        if stream is None:
            return {}
        wanted = {stream.in_fd: select.POLLIN} if self._is_listening else {}
        if stream.outgoing.unsent_bytes:
            wanted[stream.outgoing.fd] = wanted.get(stream.outgoing.fd, 0) | select.POLLOUT
        return wanted

    def read_messages(self, ready: dict[int, int]) -> Iterator[tuple[Message, bytes]]:
        """The messages that have arrived and are the agent's to handle, each once."""
        stream = self._stream
        if stream is None or not self._is_listening or stream.in_fd not in ready:
            return
        data = read_available(stream.in_fd)
        if data is None:
            return
        if not data:
            self._disconnect(LAUNCHER_GONE)
            return
        self._last_received_at = time.monotonic()
        self._is_launcher_known = True
        stream.parser.feed(data)
        try:
            for message, body in stream.parser.frames():
                if self._is_for_agent(stream, message):
                    yield message, body
        except (KeyError, TypeError, ValueError) as exc:  # FrameError is one of them
            self._disconnect(f"what the launcher sends makes no sense: {exc}")

    def _is_for_agent(self, stream: _LauncherStream, message: Message) -> bool:
        """Whether the agent is to handle it: it is not about the stream, and did not arrive before."""
        if message.get("op") != "ping":
            return True
        stream.outgoing.push({"op": "pong"})
        return False

    def _disconnect(self, reason: str) -> None:
        """Reads no more; what is unsent may still be written."""
        self._is_listening, self.failure = False, reason

    def flush(self) -> None:
        """Writes what can be written now."""
        assert self._stream is not None
        try:
            self._stream.outgoing.flush()
        except OSError:
            self._stream.outgoing.clear()
            self.failure = LAUNCHER_GONE

    def check_timeouts(self) -> None:
        """Sets ``failure`` where no launcher was heard for too long."""
        if time.monotonic() - self._last_received_at > self._lease_s:
            self.failure = f"it had not heard from the launcher for {self._lease_s:g} s"

    def flush_for_exit(self) -> None:
        """The agent is about to remove its folder, and then to end."""

    def send_final(self, message: Message) -> None:
        """Sends a last message, and everything unsent before it, within 2 s."""
        self.send_if_connected(message)
        self._flush_all()

    def _flush_all(self) -> None:
        deadline = time.monotonic() + FINAL_FLUSH_S
        self.flush()
        while self._stream is not None and self._unsent_bytes and time.monotonic() < deadline:
            select.select([], [self._stream.outgoing.fd], [], 0.1)
            self.flush()


class ResumableLauncherConnection(LauncherConnection):
    """A session's connection, over one stream after the other.

    Args:
        config: ``lease_s``, after which a silent stream is closed; ``hold_s``, after which the agent ends
            when no launcher has connected; ``owner``, the secret of the launcher that may resume the session.
        folder: the session's.
        describe: gives the agent's hello.
        on_adopted: called when another launcher has taken the session over.
    """

    def __init__(
        self,
        config: Message,
        in_fd: int,
        out_fd: int,
        folder: Path,
        describe: Callable[[], Message],
        on_adopted: Callable[[], None],
    ) -> None:
        super().__init__(float(config["lease_s"]), in_fd, out_fd, folder / "agent.log")
        self._hold_s = float(config["hold_s"])
        self.max_sleep_s = max(0.05, min(self.max_sleep_s, self._hold_s / 4))
        self._owner = config["owner"]
        self._describe, self._on_adopted = describe, on_adopted
        self._log_path = folder / "agent.log"
        self._events, self._replies = RetransmissionQueue("n", folder), RetransmissionQueue("r")
        self._received = 0
        self._pending: list[_LauncherStream] = []
        self._listener: socket.socket | None = unix_socket.listen_in_folder(folder)

    @property
    def replies(self) -> RetransmissionQueue:
        """The buffer that the file server puts its replies into."""
        return self._replies

    @property
    def drops_output(self) -> bool:
        """Whether lines of output are to be dropped, since too much is kept."""
        return self._events.is_full

    @property
    def pauses_tasks(self) -> bool:
        """Whether tasks are to wait before they send more: never while no launcher is connected."""
        return self._stream is not None and self._events.unsent_bytes > MAX_SPOOL_BYTES

    def send(self, message: Message, body: bytes = b"") -> int:
        """Queues a message that must reach the launcher; its number."""
        return self._events.push(message, body)

    def poll_events(self) -> dict[int, int]:
        """The events to poll for: descriptor → event mask."""
        wanted = super().poll_events() | {stream.in_fd: select.POLLIN for stream in self._pending}
        if self._listener is not None:
            wanted[self._listener.fileno()] = select.POLLIN
        return wanted

    # --- streams that are opened

    def read_messages(self, ready: dict[int, int]) -> Iterator[tuple[Message, bytes]]:
        """The messages that have arrived and are the agent's to handle, each once."""
        if self._listener is not None and self._listener.fileno() in ready:
            self._accept_stream(self._listener)
        for stream in list(self._pending):
            if stream.in_fd in ready:
                self._read_resume_request(stream)
        yield from super().read_messages(ready)

    def _accept_stream(self, listener: socket.socket) -> None:
        sock = unix_socket.accept_same_user(listener)
        if sock is None:
            return
        self._pending.append(_LauncherStream(sock.fileno(), sock.fileno(), sock, self._log_path))
        if len(self._pending) > MAX_PENDING_STREAMS:
            self._pending.pop(0).close()

    def _read_resume_request(self, stream: _LauncherStream) -> None:
        data = read_available(stream.in_fd)
        if data is None:
            return
        stream.parser.feed(data)
        refusal: Message | None = {}
        try:
            frame = stream.parser.next_frame()
            if frame is None and data:
                return
            if frame is not None:
                refusal = self._resume(stream, frame[0])
        except (KeyError, TypeError, ValueError):
            pass
        except OSError as exc:
            refusal = {"error": self._fail_unreadable(exc)}
        self._pending.remove(stream)
        if refusal is not None:
            stream.outgoing.push({"op": "fault", **refusal})
            with suppress(OSError):
                stream.outgoing.flush()
            stream.close()

    def _resume(self, stream: _LauncherStream, message: Message) -> Message | None:
        """Makes it the session's stream, or returns why not."""
        number, adopts = int(message["n"]), bool(message.get("adopt"))
        if message["op"] != "resume" or (adopts and self.announced_end):
            return {"error": f"it is ending: {self.announced_end}", "gone": True}
        if not adopts and message["owner"] != self._owner:
            return {"error": "another launcher has taken it over", "taken": True}
        if number > self._events.last:
            return {"error": f"it has sent {self._events.last} messages, not {number}", "taken": True}
        self._is_launcher_known = True
        if adopts and self._stream is not None:
            self._stream.outgoing.push({"op": "taken"})
            self.flush()
        self._disconnect()
        if adopts:
            self._owner = message["owner"]
            self._on_adopted()
            self._replies.acknowledge(self._replies.last)
            self._events.acknowledge(number)
        self._events.rewind(number)
        self._replies.rewind(self._replies.last if adopts else int(message["r"]))
        progress = {"received": self._received, "n": self._events.sent, "r": self._replies.sent}
        stream.outgoing.push({"op": "hello", **self._describe(), **progress})
        if self.announced_end:
            stream.outgoing.push({"op": "ending", "why": self.announced_end})
        stream.acknowledged = self._received
        self._stream = stream
        self._last_received_at = time.monotonic()
        return None

    def _disconnect(self, _reason: str = LAUNCHER_GONE) -> None:
        """Closes the stream; the agent waits for a launcher from now on."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
            if not self._is_launcher_known:
                self.failure = LAUNCHER_GONE

    def _is_for_agent(self, stream: _LauncherStream, message: Message) -> bool:
        op = message.get("op")
        if op == "ping":
            return super()._is_for_agent(stream, message)
        if op == "ack":
            self._events.acknowledge(int(message["n"]))
            self._replies.acknowledge(int(message["r"]))
        elif op == "shutdown":
            return True
        elif message["n"] > self._received:
            if message["n"] != self._received + 1:
                raise FrameError(f"message {message['n']} came after message {self._received}")
            self._received += 1
            return True
        return False

    # --- what is sent

    def flush(self) -> None:
        """Writes what can be written now."""
        stream = self._stream
        if stream is None:
            return
        outbox = stream.outgoing
        if stream.acknowledged != self._received:
            outbox.push({"op": "ack", "n": self._received})
            stream.acknowledged = self._received
        while self._fill_buffer(outbox):
            try:
                outbox.flush()
            except OSError:
                self._disconnect()
                return
            if outbox.unsent_bytes:
                return

    def _fill_buffer(self, outbox: FrameWriteBuffer) -> bool:
        """Fills the stream's buffer with replies and events by turns; False where there is nothing."""
        try:
            while outbox.unsent_bytes < WRITE_AHEAD_BYTES:
                frames = [frame for frame in (self._replies.next_frame(), self._events.next_frame()) if frame]
                if not frames:
                    break
                for frame in frames:
                    outbox.push_encoded(frame)
        except OSError as exc:
            self._fail_unreadable(exc)
        return outbox.unsent_bytes > 0

    def _fail_unreadable(self, exc: OSError) -> str:
        self.failure = f"what it kept for the launcher can't be read any more: {exc}"
        return self.failure

    def check_timeouts(self) -> None:
        """Closes a silent stream; sets ``failure`` where no launcher has connected for too long."""
        silent_s = time.monotonic() - self._last_received_at
        if self._stream is not None and silent_s > self._lease_s:
            self._disconnect()
        if self._stream is None and silent_s > self._hold_s:
            self.failure = f"no launcher had come back to it for {self._hold_s:g} s"
        for stream in [c for c in self._pending if time.monotonic() - c.since > RESUME_REQUEST_TIMEOUT_S]:
            self._pending.remove(stream)
            stream.close()

    # --- the end

    def flush_for_exit(self) -> None:
        """Sends what is kept, for up to 2 s, while its files exist; no launcher may connect any more."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for stream in self._pending:
            stream.close()
        self._pending.clear()
        self._flush_all()
