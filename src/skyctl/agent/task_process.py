"""The agent's side of a task: its process, its output line by line, its messages both ways."""

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

from skyctl.agent import forkserver, process_tree
from skyctl.agent.frames import FrameParser, FrameWriteBuffer, read_available
from skyctl.agent.module_command import module_command

MAX_OUTPUT_LINE_BYTES = 16 << 10
MAX_LOG_FILE_BYTES = 64 << 20
OUTPUT_TAIL_LINES = 20
ALLOCATOR_ENV = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0"}
"""glibc's malloc joins what is freed with what is free beside it, at once.

Small blocks that it sets aside instead lie between large ones, whose place no other large block then fits.
"""
MAX_UNDELIVERED_BYTES = 256 << 20


class TaskProcess:
    """A task's process.

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
        self.has_reported = False  # a result or an error has been sent
        self.exit_status: int | None = None
        self.dropped_lines = 0
        self.output_tail: deque[str] = deque(maxlen=OUTPUT_TAIL_LINES)
        self._parser = FrameParser()
        self._partial_line = b""
        self._log_bytes = 0
        self._log: BinaryIO | None = (folder / f"{log_file_stem(name)}.log").open("ab")
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
        self.outgoing = FrameWriteBuffer(self.control_fd)
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
        merged = {**ALLOCATOR_ENV, **os.environ, **env}
        paths = [str(package), merged.get("PYTHONPATH", "")]
        merged |= {
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            process_tree.SESSION_TAG: folder.name,
            process_tree.TASK_TAG: self.tag,
            "SKYCTL_AGENT": str(os.getpid()),
            "SKYCTL_CONTROL": str(theirs.fileno()),
            "SKYCTL_FOLDER": str(folder),
            "SKYCTL_CACHE": str(folder.parent.parent),
        }
        self._popen: subprocess.Popen[bytes] | None = None
        if forkserver.can_fork_task(package, env):
            tags = {key: merged[key] for key in (process_tree.SESSION_TAG, process_tree.TASK_TAG)}
            with suppress(OSError):  # too little memory to fork a large process: a new one is smaller
                return forkserver.fork_task(module, merged, tags, theirs.fileno(), output)
        self._popen = subprocess.Popen(
            module_command(sys.executable, "skyctl.agent.task_runner", module),
            env=merged,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
        return self._popen.pid

    def mark_exited(self, status: int) -> None:
        """The process was reaped; ``status`` as from os.waitstatus_to_exitcode (negative: a signal)."""
        self.exit_status = status
        if self._popen is not None:
            self._popen.returncode = status

    def send(self, message: dict[str, Any], body: bytes) -> bool:
        """Queues a message for the task. False where it reads nothing and too much is queued already."""
        if self._sock is not None and self.exit_status is None:
            self.outgoing.push(message, body)
        return self.outgoing.unsent_bytes <= MAX_UNDELIVERED_BYTES

    @property
    def is_channel_open(self) -> bool:
        """Whether messages may still arrive from the task."""
        return self._sock is not None

    def read_messages(self) -> list[tuple[dict[str, Any], bytes]]:
        """The messages that the task has sent. Raises FrameError where that is no frame."""
        data = read_available(self.control_fd) if self._sock is not None else None
        if data == b"":
            self.close_channel()
        elif data:
            self._parser.feed(data)
        return list(self._parser.frames())

    def read_output(self) -> list[str]:
        """Whole lines that the task has printed; they are also written to its log."""
        data = read_available(self.output_fd, 64 << 10) if self.output_fd >= 0 else None
        if data == b"":
            self._close_output()
        if not data:
            return []
        self._write_log(data)
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        while len(self._partial_line) > MAX_OUTPUT_LINE_BYTES:
            lines.append(self._partial_line[:MAX_OUTPUT_LINE_BYTES])
            self._partial_line = self._partial_line[MAX_OUTPUT_LINE_BYTES:]
        return self._decoded(lines)

    def read_final_output(self) -> list[str]:
        """The lines left in the pipe of a task that has ended, with the unfinished one."""
        output = []
        while lines := self.read_output():
            output += lines
        last, self._partial_line = [self._partial_line] if self._partial_line else [], b""
        return output + self._decoded(last)

    def _decoded(self, lines: list[bytes]) -> list[str]:
        texts = [line.rstrip(b"\r").decode(errors="replace") for line in lines]
        self.output_tail.extend(texts)
        return texts

    def _write_log(self, data: bytes) -> None:
        """Appends to the log, unless it can't be written or gets too long; the launcher has the lines."""
        if self._log is None:
            return
        try:
            self._log.write(data)
            self._log.flush()
            self._log_bytes += len(data)
            if self._log_bytes > MAX_LOG_FILE_BYTES:
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

    def close_channel(self) -> None:
        """Closes the agent's end of the channel; messages for the task are dropped."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        self.outgoing.clear()

    def _close_output(self) -> None:
        if self.output_fd >= 0:
            os.close(self.output_fd)
            self.output_fd = -1

    def close(self) -> None:
        """Closes the channel, the output and the log."""
        self.close_channel()
        self._close_output()
        self._close_log()

    def exit_outcome(self) -> dict[str, Any]:
        """The return code (negative: a signal) and the signal's name."""
        return {"returncode": self.exit_status, "signal": signal_name(self.exit_status)}

    def exit_event(self, why: str | None) -> dict[str, Any]:
        """How it ended without a result or an error; ``why``: the agent's reason to end it, if it did."""
        event = {"event": "exit", **self.exit_outcome(), "tail": list(self.output_tail)}
        return {**event, "agent_ended": why} if why else event


def signal_name(status: int | None) -> str | None:
    """``SIGKILL`` for -9; None for one that ended by itself."""
    if status is None or status >= 0:
        return None
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def log_file_stem(name: str) -> str:
    """A task's name as a file name: what might trouble a shell or a path becomes ``_``."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name).lstrip(".")[:100] or "task"
