"""A fork server: one process that has imported what tasks need and forks the agents of local nodes.

Importing torch takes a second and 140 MB in every process; forked, all share one copy until they write to it.
A forked agent forks its tasks in turn. The launcher (``remote/forkserver_client.py``) starts the server and
asks it for agents over a socket of whole messages; when that is closed, the server ends. It never uses an
accelerator, has one thread, and keeps nothing open for those it forks. Linux only.

Messages: the server sends ``{"ready": true}`` once; then each ``{"program": …}`` with three descriptors (the
agent's standard input and output, its standard error, where its exit status is written) is answered with
``{"pid": …}`` and the process's pidfd, or ``{"error": …}``.

The kernel goes on showing the environment and arguments that the server was started with. The tags by which
our processes are found (``process_tree.find_tagged``) are looked up there, so the server is started with room
for them (``tag_placeholders``), and each forked task writes its own into that room.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TextIO

from skyctl.agent.process_tree import SESSION_TAG, TASK_TAG

MAX_TAG_CHARS = 64
DESCRIPTOR_FOLDER = "/proc/self/fd"
_TAG_FILLER = "-"


def tag_placeholders() -> dict[str, str]:
    """The variables that a fork server starts with, of the longest values that a tag can have.

    Forked tasks write their own tags over them (``write_process_tags``), for ``/proc/PID/environ``.
    """
    return dict.fromkeys((SESSION_TAG, TASK_TAG), _TAG_FILLER * MAX_TAG_CHARS)


def write_process_tags(tags: Mapping[str, str]) -> None:
    """Writes those tags into what ``/proc/PID/environ`` shows of this process.

    Raises:
        OSError: there is no room for them, or the kernel does not show what was written.
    """
    block = b"\0" + Path("/proc/self/environ").read_bytes()
    start = _own_stat_field(50)
    if not start:
        raise OSError("the kernel does not say where this process's environment is")
    for key, value in tags.items():
        entry = f"{key}={value}".encode()
        at = block.find(b"\0" + f"{key}={_TAG_FILLER}".encode())
        end = block.find(b"\0", at + 1)
        if at < 0 or len(entry) > end - at - 1:
            raise OSError(f"no room in this process's environment for {key}={value}")
        ctypes.memmove(start + at, entry.ljust(end - at - 1, b"\0"), end - at - 1)
    shown = b"\0" + Path("/proc/self/environ").read_bytes() + b"\0"
    for key, value in tags.items():
        if b"\0" + f"{key}={value}".encode() + b"\0" not in shown:
            raise OSError(f"this process's environment does not show {key}={value}")


def set_process_title(text: str) -> None:
    """Sets what ``ps`` shows of this process, as far as there is room."""
    start = _own_stat_field(48)
    room = _own_stat_field(49) - start
    if start and room > 1:
        ctypes.memmove(start, text.encode()[: room - 1].ljust(room, b"\0"), room)


def _own_stat_field(number: int) -> int:
    """A field of /proc/self/stat, counted as in proc(5)."""
    text = Path("/proc/self/stat").read_bytes()
    return int(text[text.rfind(b")") + 2 :].split()[number - 3])


def count_threads() -> int:
    """How many threads this process has."""
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208


def open_descriptors() -> set[int]:
    """This process's descriptors."""
    descriptors = {int(name) for name in os.listdir(DESCRIPTOR_FOLDER)}  # noqa: PTH208
    return {fd for fd in descriptors if _is_descriptor_open(fd)}  # not the one that the listing took


def _is_descriptor_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def close_other_descriptors(keep: set[int]) -> None:
    """Closes every descriptor but the standard ones and those."""
    for fd in open_descriptors() - keep - {0, 1, 2}:
        os.close(fd)


def restore_default_signals() -> None:
    """Gives signals the handlers that a new Python has."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def reopen_standard_streams() -> None:
    """Opens ``sys.stdin``, ``stdout``, ``stderr`` on descriptors 0 to 2, unbuffered as with ``python -u``."""
    sys.stdin = io.TextIOWrapper(io.FileIO(0, "r", closefd=False))
    sys.stdout, sys.stderr = _open_text_writer(1, "strict"), _open_text_writer(2, "backslashreplace")


def _open_text_writer(fd: int, errors: str) -> TextIO:
    return io.TextIOWrapper(io.FileIO(fd, "w", closefd=False), errors=errors, write_through=True)


def run_and_exit_process(action: Callable[[], int | None]) -> NoReturn:
    """Runs the action, then ends the process as a Python of its own would, above the server's frames."""
    status = 1
    try:
        status = _run_for_status(action)
        threading._shutdown()  # type: ignore[attr-defined]  # as multiprocessing does: waits for threads
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(status)


def _run_for_status(action: Callable[[], int | None]) -> int:
    try:
        return int(action() or 0)
    except SystemExit as exc:
        if exc.code is None or isinstance(exc.code, int):
            return (exc.code or 0) & 0xFF
        print(exc.code, file=sys.stderr)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # noqa: BLE001 - nobody above is left to see it
        traceback.print_exc()
    return 1


MAX_MESSAGE_BYTES = 64 << 10


@dataclass
class _ForkState:
    """In a forked process: the server's package, and the descriptors that its imports opened."""

    package: Path | None = None
    keep: set[int] = field(default_factory=set)


_fork_state = _ForkState()


def is_forked_process() -> bool:
    """Whether this process was forked from a fork server, or by an agent that was."""
    return _fork_state.package is not None


def can_fork_task(package: Path, env: Mapping[str, str]) -> bool:
    """Whether a task of that package, with that environment added, may be forked from this process.

    Environment variables other than PYTHONPATH may have been read already, when this process started.
    """
    same_setting = _fork_state.package == package and set(env) <= {"PYTHONPATH"}
    return same_setting and count_threads() == 1 and not _is_accelerator_lost()


def _is_accelerator_lost() -> bool:
    """Whether an accelerator was used, or only counted, before the fork: torch refuses it after that."""
    torch: Any = sys.modules.get("torch")
    current = torch.accelerator.current_accelerator() if torch is not None else None
    return current is not None and bool(getattr(getattr(torch, current.type), "_is_in_bad_fork", bool)())


def fork_task(module: str, env: Mapping[str, str], tags: Mapping[str, str], control: int, output: int) -> int:
    """Forks a task: ``skyctl.agent.task_runner`` with its whole environment. Its pid. Raises OSError."""
    pid = os.fork()
    if not pid:
        run_and_exit_process(lambda: _run_forked_task(module, env, tags, control, output))
    return pid


def _run_forked_task(
    module: str, env: Mapping[str, str], tags: Mapping[str, str], control: int, output: int
) -> int:
    os.setsid()
    restore_default_signals()
    null = os.open(os.devnull, os.O_RDONLY)
    for fd, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(fd, target)
    close_other_descriptors(_fork_state.keep | {control})
    reopen_standard_streams()
    write_process_tags(tags)
    set_process_title(f"skyctl-task {module}")
    os.environ.clear()
    os.environ.update(env)
    paths = env["PYTHONPATH"].split(os.pathsep)
    sys.path[:] = [*paths, *(path for path in sys.path if path not in paths)]
    sys.argv = ["skyctl.agent.task_runner", module]
    from skyctl.agent import task_runner

    return task_runner.main()


class _ForkServer:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._statuses: dict[int, int] = {}  # pid → where its exit status is written
        self._wake_fd, wake = os.pipe()
        for fd in (self._wake_fd, wake):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def run(self) -> None:
        """Forks and reaps until the launcher closes its end."""
        poll = select.poll()
        for fd in (self._sock.fileno(), self._wake_fd):
            poll.register(fd, select.POLLIN)
        while True:
            ready = dict(poll.poll())
            if self._wake_fd in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_fd, 4096)
            if self._sock.fileno() in ready and not self._serve():
                return
            self._reap()

    def _serve(self) -> bool:
        data, fds, _, _ = socket.recv_fds(self._sock, MAX_MESSAGE_BYTES, 3)
        if not data:
            return False
        try:
            pid = self._fork_agent(json.loads(data)["program"], fds)
            child = os.pidfd_open(pid)
        except OSError as exc:
            for fd in fds:
                os.close(fd)
            self._sock.send(json.dumps({"error": str(exc)}).encode())
            return True
        for fd in fds[:2]:
            os.close(fd)
        self._statuses[pid] = fds[2]
        try:
            socket.send_fds(self._sock, [json.dumps({"pid": pid}).encode()], [child])
        finally:
            os.close(child)
        return True

    def _fork_agent(self, program: str, fds: Sequence[int]) -> int:
        pid = os.fork()
        if not pid:
            run_and_exit_process(lambda: _run_forked_agent(program, fds))
        return pid

    def _reap(self) -> None:
        while self._statuses:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            with contextlib.suppress(KeyError, OSError):
                fd = self._statuses.pop(pid)
                os.write(fd, str(os.waitstatus_to_exitcode(status)).encode())
                os.close(fd)


def _run_forked_agent(program: str, fds: Sequence[int]) -> None:
    os.setsid()
    restore_default_signals()
    for fd, target in zip((fds[0], fds[0], fds[1]), (0, 1, 2), strict=True):
        os.dup2(fd, target)
    close_other_descriptors(_fork_state.keep)
    reopen_standard_streams()
    set_process_title("skyctl-agent")
    for key in tag_placeholders():
        os.environ.pop(key, None)
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(program, scope)  # noqa: S102 - what would be given to `python -c`


def main(fd: int, package: str, modules: Sequence[str]) -> None:
    """Imports the modules, calls their ``warm`` where they have one, and forks agents from then on.

    Ends with status 1 where forking would not be safe.
    """
    sock = socket.socket(fileno=fd)
    write_process_tags({})
    gc.disable()  # of what is imported nothing becomes garbage: looking for it takes a quarter of the time
    for name in modules:
        getattr(importlib.import_module(name), "warm", lambda: None)()
    if count_threads() != 1:
        sys.exit("skyctl: what was imported has started threads; nodes are started one by one")
    _fork_state.package = Path(package)
    _fork_state.keep = open_descriptors() - {0, 1, 2, fd}
    gc.collect()
    gc.freeze()
    gc.enable()
    server = _ForkServer(sock)
    sock.send(json.dumps({"ready": True}).encode())
    server.run()
    os._exit(0)  # who ended it waits for that, and torch takes half a second to be torn down
