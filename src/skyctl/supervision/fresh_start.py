"""A supervisor that starts its own program anew while its run trains, since torch can't be unloaded.

The process executes its own command line again. Its id, terminal, streams, folder and the run's lock stay;
all that it had imported goes. The run is left to its nodes and taken over again, as where another process
takes it over. No signal that asks for an end is lost on the way.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from skyctl.agent.process_tree import process_table
from skyctl.errors import SkyctlError
from skyctl.files import RunPaths
from skyctl.run.callbacks import Detached, RunCallbacks, StepProgress
from skyctl.run.first_steps_check import FIRST_STEPS
from skyctl.run.live_run import LiveRun
from skyctl.run.run_lock import RunLock
from skyctl.run.wandb_writer import wandb_project
from skyctl.supervision.run_settings import cluster_of

LEAST_LEFT_S = 120.0
"""A run that is expected to end sooner is not left: its launcher's memory is free soon anyway."""
LEFT_RUN = "SKYCTL_LEFT_RUN"
"""The variable that tells the fresh start which run the process has left; no other process obeys it."""
END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LOOK_S = 0.05


@dataclass(frozen=True)
class LeftRun:
    """The run and the options that a process tells its own fresh start.

    Attributes:
        lock_fd: the descriptor that holds the run's lock.
        signals_fd: a pipe with the numbers of the signals that have come and were not acted on.
        yes, as_json, quiet, verbose: the command's options that still matter.
    """

    run_id: str
    yes: bool
    as_json: bool
    quiet: bool
    verbose: bool
    pid: int = 0
    lock_fd: int = -1
    signals_fd: int = -1

    def lock(self) -> RunLock:
        """The run's lock, which this process has held all the time."""
        return RunLock.inherited(RunPaths(self.run_id), self.lock_fd)

    def signals(self) -> set[int]:
        """The signals that have come meanwhile. May be called once."""
        os.set_blocking(self.signals_fd, False)
        with open(self.signals_fd, "rb", buffering=0) as pipe:  # noqa: PTH123 - a descriptor
            return set(pipe.read() or b"") & set(END_SIGNALS)


def find_left_run() -> LeftRun | None:
    """The run that this process has left before it started anew; None: there is none."""
    text = os.environ.pop(LEFT_RUN, None)
    if text is None:
        return None
    left = LeftRun(**json.loads(text))
    return left if left.pid == os.getpid() else None


def repeatable_command() -> list[str] | None:
    """The arguments with which this process can be started anew; None where it is more than one command.

    So it is in a script, a notebook or a test that calls skyctl's code.
    """
    words, program = sys.argv[1:], sys.modules["__main__"]
    module = getattr(program.__spec__, "name", None)
    is_skyctl = module == "skyctl.__main__" or Path(sys.argv[0]).name == "skyctl"
    was_given = words and sys.orig_argv[-len(words) :] == words
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not (sys.executable and is_skyctl and was_given and in_main_thread):
        return None
    return [sys.executable, *sys.orig_argv[1:]]


class FreshStart:
    """Leaves a run for a fresh start of this program, once it trains and only if that saves memory.

    A context for the time in which the run is supervised. For the main thread.

    Args:
        command: as ``repeatable_command`` has it.
        left: what the fresh start is told.
    """

    def __init__(self, run: LiveRun, command: Sequence[str], left: LeftRun) -> None:
        self._run, self._command, self._left = run, command, left
        self._first_attempt = len(run.journal.state.attempts) + 1
        self._is_off = wandb_project(run.journal.state) is not None  # its library's own process would be lost
        self.begun = False

    def __enter__(self) -> FreshStart:
        self._read, self._write = os.pipe()
        for fd in (self._read, self._write):
            os.set_blocking(fd, False)
        self._fd_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._fd_before)
        os.close(self._read)
        os.close(self._write)

    def beside(self, callbacks: RunCallbacks) -> RunCallbacks:
        """The same callbacks, which leave the run after a step (``Detached``) where a fresh start is due."""
        unanswered = False

        def step(progress: StepProgress) -> None:
            nonlocal unanswered
            callbacks.step(progress)
            unanswered = bool(self._signals()) or unanswered
            if not unanswered and self._is_due(progress):
                self.begun = True
                raise Detached

        def interrupted() -> str:
            nonlocal unanswered
            answer = callbacks.interrupted()
            self._signals()
            unanswered, self._is_off = False, self._is_off or answer != "go on"
            return answer

        return replace(callbacks, step=step, interrupted=interrupted)

    def execute(self, quiet: Callable[[], None]) -> None:
        """Leaves the run and starts the program anew; returns where the system refuses, with the run left.

        Args:
            quiet: called when nothing more will be shown.
        """
        lock = self._run.lock
        assert lock is not None, "a run that is supervised"
        handlers = {number: signal.getsignal(number) for number in END_SIGNALS}
        for number, handler in handlers.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, _do_nothing)  # each signal is in the pipe nevertheless
        signal.pthread_sigmask(signal.SIG_BLOCK, END_SIGNALS)  # from the moment at which handlers are gone
        self._run.leave(for_itself=True)
        os.set_inheritable(self._read, True)
        left = replace(self._left, pid=os.getpid(), lock_fd=lock.inherit(), signals_fd=self._read)
        quiet()
        atexit._run_exitfuncs()  # what the user's code, loaded here, wants done at its process's end
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        environment = {**os.environ, LEFT_RUN: json.dumps(asdict(left))}
        with suppress(OSError):
            os.execve(self._command[0], list(self._command), environment)  # noqa: S606 - it is our own
        lock.release()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, END_SIGNALS)
        for came in self._signals():
            signal.raise_signal(came)

    def _signals(self) -> set[int]:
        """The signals that have come since this was called last."""
        try:
            return set(os.read(self._read, 4096)) & set(END_SIGNALS)
        except BlockingIOError:
            return set()

    def _is_due(self, progress: StepProgress) -> bool:
        if self._is_off or "torch" not in sys.modules or (progress.left_s or 0.0) < LEAST_LEFT_S:
            return False
        state = self._run.journal.state
        attempt = state.attempts[-1]
        if state.status != "running" or attempt.number != self._first_attempt:
            return False  # it is ending; or its restarts would be counted anew
        if progress.step - attempt.from_step == FIRST_STEPS:  # which are compared after this one was told
            return False
        if any(session.disconnected_s for session in self._run.sessions.values()):
            return False
        with suppress(SkyctlError):
            if cluster_of(state) == self._run.cluster:
                return True
        self._is_off = True  # its file is not what it was: the run could not be taken over
        return False


class HeldSignals:
    """A context in which signals that ask for an end are noted, and not acted on before ``release``.

    Args:
        earlier: those that had come before.
    """

    def __init__(self, earlier: Iterable[int]) -> None:
        self.noted = set(earlier)
        self.released = False
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> HeldSignals:
        for number in END_SIGNALS:
            handler = signal.getsignal(number)
            if handler is not signal.SIG_IGN:
                self._handlers[number] = handler
                signal.signal(number, self._note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, END_SIGNALS)  # blocked since before the fresh start
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def release(self) -> None:
        """Acts on what was noted, as if it came now; on Ctrl-C as soon as it is an event of the run's."""
        self._restore()
        self.released = True
        if signal.SIGINT in self.noted:
            threading.Thread(target=_interrupt_when_watched, name="interrupt", daemon=True).start()
        for number in (signal.SIGHUP, signal.SIGTERM):
            if number in self.noted:
                signal.raise_signal(number)

    def _restore(self) -> None:
        while self._handlers:
            signal.signal(*self._handlers.popitem())

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.noted.add(number)


def reap_children() -> None:
    """Waits, in threads, for the children that this process had before it started anew."""
    for pid, entry in process_table().items():
        if entry.parent == os.getpid():
            threading.Thread(target=_reap, args=(pid,), name="reap", daemon=True).start()


def _reap(pid: int) -> None:
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _interrupt_when_watched() -> None:
    while signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        time.sleep(LOOK_S)
    signal.raise_signal(signal.SIGINT)


def _do_nothing(_number: int, _frame: FrameType | None) -> None:
    """A handler of Python's: the signal's number is written down, which is not so of one that is ignored."""
