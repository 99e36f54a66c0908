"""One process that has imported what tasks need, and forks the agents of this machine's local nodes.

Importing torch takes a second and 140 MB in every process; forked, all share one copy until they write to it.
An agent that was born here forks its tasks in turn. The launcher (``remote/nursery.py``) starts the nursery
and asks it for agents over a socket of whole messages; when that ends, so does the nursery. It never uses an
accelerator, has one thread, and holds nothing open for those it forks.

Messages: the nursery says ``{"ready": true}`` once; then each ``{"program": …}`` with three descriptors (the
agent's standard input and output, its standard error, where its exit status is written) is answered with
``{"pid": …}`` and the process's pidfd, or ``{"error": …}``.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skyctl.agent import fork

MESSAGE_BYTES = 64 << 10
ACCELERATORS = ("cuda", "xpu")
"""Those of torch's that a fork may lose."""


@dataclass
class _Born:
    """What a process forked from the nursery knows of it: its package, and files that its imports opened."""

    package: Path | None = None
    keep: set[int] = field(default_factory=set)


_born = _Born()


def born_here() -> bool:
    """Whether this process was forked from a nursery (or by an agent that was)."""
    return _born.package is not None


def can_fork(package: Path, env: Mapping[str, str]) -> bool:
    """Whether a task of that package, with that environment added, may be forked from this process.

    What else than PYTHONPATH is in the environment may have been read already, when this process started.
    """
    alike = _born.package == package and set(env) <= {"PYTHONPATH"}
    return alike and fork.threads() == 1 and not _accelerator_lost()


def _accelerator_lost() -> bool:
    """Whether an accelerator was used, or only counted, before the fork: torch refuses it after that."""
    there = (sys.modules.get(f"torch.{kind}") for kind in ACCELERATORS)
    return any(getattr(module, "_is_in_bad_fork", bool)() for module in there)


def fork_task(module: str, env: Mapping[str, str], tags: Mapping[str, str], control: int, output: int) -> int:
    """Forks a task: ``skyctl.agent.task`` with its whole environment. Its pid. Raises OSError."""
    pid = os.fork()
    if not pid:
        fork.run_and_exit(lambda: _task(module, env, tags, control, output))
    return pid


def _task(module: str, env: Mapping[str, str], tags: Mapping[str, str], control: int, output: int) -> int:
    os.setsid()
    fork.default_signals()
    null = os.open(os.devnull, os.O_RDONLY)
    for fd, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(fd, target)
    fork.close_others(_born.keep | {control})
    fork.fresh_streams()
    fork.write_tags(tags)
    fork.write_arguments(f"skyctl-task {module}")
    os.environ.clear()
    os.environ.update(env)
    paths = env["PYTHONPATH"].split(os.pathsep)
    sys.path[:] = [*paths, *(path for path in sys.path if path not in paths)]
    sys.argv = ["skyctl.agent.task", module]
    from skyctl.agent import task

    return task.main()


class _Nursery:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._statuses: dict[int, int] = {}  # pid → where its exit status is written
        self._wake_fd, wake = os.pipe()
        for fd in (self._wake_fd, wake):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def run(self) -> None:
        """Until the launcher's end is closed."""
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
        data, fds, _, _ = socket.recv_fds(self._sock, MESSAGE_BYTES, 3)
        if not data:
            return False
        try:
            pid = self._birth(json.loads(data)["program"], fds)
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

    def _birth(self, program: str, fds: Sequence[int]) -> int:
        pid = os.fork()
        if not pid:
            fork.run_and_exit(lambda: _agent(program, fds))
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


def _agent(program: str, fds: Sequence[int]) -> None:
    os.setsid()
    fork.default_signals()
    for fd, target in zip((fds[0], fds[0], fds[1]), (0, 1, 2), strict=True):
        os.dup2(fd, target)
    fork.close_others(_born.keep)
    fork.fresh_streams()
    fork.write_arguments("skyctl-agent")
    for key in fork.placeholders():
        os.environ.pop(key, None)
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(program, scope)  # noqa: S102 - what would be given to `python -c`


def main(fd: int, package: str, modules: Sequence[str]) -> None:
    """Imports the modules, calls their ``warm`` where they have one, and forks agents from then on.

    Ends with status 1 where forking would not be safe.
    """
    sock = socket.socket(fileno=fd)
    fork.write_tags({})
    for name in modules:
        getattr(importlib.import_module(name), "warm", lambda: None)()
    if fork.threads() != 1:
        sys.exit("skyctl: what was imported has started threads; nodes are started one by one")
    _born.package = Path(package)
    _born.keep = fork.open_files() - {0, 1, 2, fd}
    gc.collect()
    gc.freeze()
    nursery = _Nursery(sock)
    sock.send(json.dumps({"ready": True}).encode())
    nursery.run()
