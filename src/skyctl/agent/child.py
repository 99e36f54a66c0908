"""The agent's side of a task: starting it, its output line by line, its messages both ways."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from skyctl.agent import nursery, process
from skyctl.agent.stream import Outbox, read_some
from skyctl.agent.wire import Parser

LINE_BYTES = 16 << 10
LOG_FILE_BYTES = 64 << 20
TAIL_LINES = 20
INBOX_BYTES = 256 << 20


class Child:
    """One running task.

    Args:
        number: the launcher's number for it.
        name: its log is called ``NAME.log`` in the session's folder.
        env: added to the agent's environment; ``PYTHONPATH`` comes after skyctl's own package.
    """

    def __init__(
        self, number: int, name: str, module: str, env: dict[str, str], folder: Path, package: Path
    ) -> None:
        self.number = number
        self.name = name
        self.tag = f"{folder.name}/{number}"
        self.spoke = False  # a result or an error has been sent
        self.status: int | None = None
        self.dropped_lines = 0
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.parser = Parser()
        self._partial = b""
        self._log_bytes = 0
        self._log: BinaryIO | None = (folder / f"{safe_name(name)}.log").open("ab")
        ours, theirs = socket.socketpair()
        self.output_fd, output = os.pipe()
        try:
            self.pid = self._start(module, env, folder, package, theirs, output)
        except BaseException:
            ours.close()
            os.close(self.output_fd)
            self._log.close()
            raise
        finally:
            theirs.close()
            os.close(output)
        self._sock: socket.socket | None = ours
        self.control_fd = ours.fileno()
        self.outbox = Outbox(self.control_fd)
        os.set_blocking(self.output_fd, False)

    def _start(
        self,
        module: str,
        env: dict[str, str],
        folder: Path,
        package: Path,
        theirs: socket.socket,
        output: int,
    ) -> int:
        merged = {**os.environ, **env}
        paths = [str(package), merged.get("PYTHONPATH", "")]
        merged |= {
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            process.SESSION_TAG: folder.name,
            process.TASK_TAG: self.tag,
            "SKYCTL_AGENT": str(os.getpid()),
            "SKYCTL_CONTROL": str(theirs.fileno()),
            "SKYCTL_FOLDER": str(folder),
            "SKYCTL_CACHE": str(folder.parent.parent),
        }
        self._popen: subprocess.Popen[bytes] | None = None
        if nursery.can_fork(package, env):
            tags = {key: merged[key] for key in (process.SESSION_TAG, process.TASK_TAG)}
            with suppress(OSError):  # too little memory to fork a large process: a new one is smaller
                return nursery.fork_task(module, merged, tags, theirs.fileno(), output)
        self._popen = subprocess.Popen(
            [sys.executable, "-u", "-P", "-m", "skyctl.agent.task", module],
            env=merged,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
        return self._popen.pid

    def ended(self, status: int) -> None:
        """The agent has reaped it; ``status`` as from os.waitstatus_to_exitcode (negative: a signal)."""
        self.status = status
        if self._popen is not None:
            self._popen.returncode = status

    def deliver(self, message: dict[str, Any], body: bytes) -> bool:
        """Queues a message for the task. False where it reads nothing and too much waits already."""
        if self._sock is not None and self.status is None:
            self.outbox.push(message, body)
        return self.outbox.size_bytes <= INBOX_BYTES

    @property
    def line_open(self) -> bool:
        """Whether messages may still come from the task."""
        return self._sock is not None

    def read_messages(self) -> list[tuple[dict[str, Any], bytes]]:
        """What the task has sent. Raises WireError where that is no frame."""
        data = read_some(self.control_fd) if self._sock is not None else None
        if data == b"":
            self.close_control()
        elif data:
            self.parser.feed(data)
        return list(self.parser.frames())

    def read_output(self) -> list[str]:
        """Whole lines the task has printed; also written to its log."""
        data = read_some(self.output_fd, 64 << 10) if self.output_fd >= 0 else None
        if data == b"":
            self._close_output()
        if not data:
            return []
        self._write_log(data)
        *lines, self._partial = (self._partial + data).split(b"\n")
        while len(self._partial) > LINE_BYTES:
            lines.append(self._partial[:LINE_BYTES])
            self._partial = self._partial[LINE_BYTES:]
        return self._decoded(lines)

    def last_output(self) -> list[str]:
        """What is still in its pipe when it has ended, with the unfinished line."""
        found = []
        while lines := self.read_output():
            found += lines
        last, self._partial = [self._partial] if self._partial else [], b""
        return found + self._decoded(last)

    def _decoded(self, lines: list[bytes]) -> list[str]:
        texts = [line.rstrip(b"\r").decode(errors="replace") for line in lines]
        self.tail.extend(texts)
        return texts

    def _write_log(self, data: bytes) -> None:
        """A log that can't be written (disk full) or gets too long ends; the launcher has the lines."""
        if self._log is None:
            return
        try:
            self._log.write(data)
            self._log.flush()
            self._log_bytes += len(data)
            if self._log_bytes > LOG_FILE_BYTES:
                self._log.write(b"\n[skyctl: the log ends here, it is over its limit]\n")
                self._close_log()
        except OSError:
            self._close_log()

    def _close_log(self) -> None:
        log, self._log = self._log, None
        try:
            if log is not None:
                log.close()
        except OSError:
            pass

    def close_control(self) -> None:
        """Closes our end of its line; what waits for it is dropped."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        self.outbox.clear()

    def _close_output(self) -> None:
        if self.output_fd >= 0:
            os.close(self.output_fd)
            self.output_fd = -1

    def close(self) -> None:
        """Closes all."""
        self.close_control()
        self._close_output()
        self._close_log()

    def outcome(self) -> dict[str, Any]:
        """Return code (negative: a signal) and the signal's name."""
        return {"returncode": self.status, "signal": signal_name(self.status)}

    def exit_event(self, why: str | None) -> dict[str, Any]:
        """How it ended without a result or an error; ``why`` the agent ended it, if it did."""
        event = {"event": "exit", **self.outcome(), "tail": list(self.tail)}
        return {**event, "agent_ended": why} if why else event


def signal_name(status: int | None) -> str | None:
    """``SIGKILL`` for -9; None for one that ended by itself."""
    if status is None or status >= 0:
        return None
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def safe_name(name: str) -> str:
    """A task's name as a file's: what might trouble a shell or a path becomes ``_``."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name).lstrip(".")[:100] or "task"
