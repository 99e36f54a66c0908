"""Processes of skyctl that have torch already: our own fork server forks them from one that has imported it.

Half of what a short command takes is imports. A forked process is as any other: it has its own folder,
environment, output, exit status and tags in ``/proc``. Two things differ from ``python -m skyctl``. It is a
session's leader, and it ends without Python's tearing down of modules.

The variables that Python and its libraries read while they are loaded can't change afterwards. A process that
asks for other ones gets a Python of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from skyctl.agent.forkserver import MAX_MESSAGE_BYTES
from skyctl.remote.forkserver_client import FORKSERVER_PROGRAM

from .processes import PATIENCE_S

SOURCE = Path(__file__).parents[2] / "src"
MODULES = (
    "skyctl.workload.workload",  # torch first, as skyctl imports it
    "sympy",
    "torch.distributed.tensor",
    "skyctl.planner.api",
    "skyctl.supervision.plan_supervision",
    "skyctl.cli.app",
    "skyctl.cli.run_display",
)
READ_WHILE_LOADED = (
    *("ATEN_", "COVERAGE", "CUDA_", "GOMP_", "KMP_", "LANG", "LC_", "LD_", "MALLOC_", "MKL_"),
    *("NCCL_", "OMP_", "OPENBLAS_", "PYTHON", "PYTORCH_", "TORCH", "TZ"),
)
"""How variables begin that libraries read when they are loaded."""
ROOM = {"SKYCTL_HOME": 240, "SKYCTL_TEST_TAG": 80}
"""By variable that tests find processes by, the longest value."""
NAME = "warm_python"
"""Part of the server's command, by which ``conftest`` knows it."""

_CHILD = """
import os, runpy, sys
from skyctl.agent import forkserver
env, words, folder, rooms = {asked!r}
sys.orig_argv = [sys.executable, "-m", "skyctl", *words]
forkserver.set_process_title(" ".join(sys.orig_argv))
forkserver._fork_state = forkserver._ForkState()
os.environ.clear()
os.environ.update(env)
forkserver.write_process_tags({{name: env[name] for name in rooms if name in env}})
null = os.open(os.devnull, os.O_RDONLY)
os.dup2(null, 0)
os.close(null)
sys.stdout = open(1, "w", closefd=False)
sys.stderr = open(2, "w", 1, errors="backslashreplace", closefd=False)
os.chdir(folder)
sys.path[:2] = [folder]
sys.argv = ["skyctl", *words]
runpy.run_module("skyctl", run_name="__main__", alter_sys=True)
"""


class ForkedCommand:
    """A forked process, as ``subprocess.Popen`` has one."""

    def __init__(self, args: Sequence[str], pid: int, pidfd: int, status_fd: int) -> None:
        self.args, self.pid, self.returncode = list(args), pid, None
        self._fds: tuple[int, int] | None = (pidfd, status_fd)

    returncode: int | None

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None: it still runs."""
        return self._status_within(0)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status. Raises subprocess.TimeoutExpired."""
        code = self._status_within(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def _status_within(self, seconds: float | None) -> int | None:
        if self._fds is None:
            return self.returncode
        pidfd, status_fd = self._fds
        if not _is_readable(pidfd, seconds):
            return None
        assert _is_readable(status_fd, PATIENCE_S), "the fork server does not say how its process ended"
        self.returncode = int(os.read(status_fd, 16))
        os.close(pidfd)
        os.close(status_fd)
        self._fds = None
        return self.returncode


class WarmPython:
    """The fork server of one test process; it ends with this."""

    def __init__(self) -> None:
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._env = dict(os.environ)
        room = {name: "-" * chars for name, chars in ROOM.items()}
        with theirs:
            words = ["-X", f"{NAME}={'-' * 400}", "-c", FORKSERVER_PROGRAM]
            self._process = subprocess.Popen(
                [sys.executable, *words, str(theirs.fileno()), str(SOURCE), *MODULES],
                env=self._env | room | {"OPENBLAS_NUM_THREADS": "1"},  # its threads would not be forked
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        if not self._receive()[0].get("ready"):
            self.close()
            raise RuntimeError("the fork server of tests did not start")

    def can_run(self, env: Mapping[str, str]) -> bool:
        """Whether a process with that environment may be forked."""
        changed = {name for name in {*env, *self._env} if env.get(name) != self._env.get(name)}
        return not any(name.startswith(READ_WHILE_LOADED) for name in changed) and all(
            len(env.get(name, "")) <= chars for name, chars in ROOM.items()
        )

    def start(
        self, words: Sequence[str], env: Mapping[str, str], folder: Path, out: int, err: int
    ) -> ForkedCommand:
        """Forks ``python -m skyctl WORDS`` there. ``out``, ``err``: its output's descriptors."""
        program = _CHILD.format(asked=(dict(env), list(words), str(folder), list(ROOM)))
        status, theirs = os.pipe()
        socket.send_fds(self._sock, [json.dumps({"program": program}).encode()], [out, err, theirs])
        os.close(theirs)
        answer, pidfd = self._receive()
        assert pidfd is not None, answer
        return ForkedCommand(["skyctl", *words], int(answer["pid"]), pidfd, status)

    def close(self) -> None:
        """Ends the server."""
        self._sock.close()
        self._process.wait()

    def _receive(self) -> tuple[dict[str, object], int | None]:
        self._sock.settimeout(PATIENCE_S)
        data, fds, _, _ = socket.recv_fds(self._sock, MAX_MESSAGE_BYTES, 1)
        return (json.loads(data) if data else {}), (fds[0] if fds else None)


@cache
def warm_python() -> WarmPython:
    """That of this process, started when somebody first asks."""
    return WarmPython()


def close_warm_python() -> None:
    """Ends it, where there is one."""
    if warm_python.cache_info().currsize:
        warm_python().close()
        warm_python.cache_clear()


def _is_readable(fd: int, timeout_s: float | None) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))
