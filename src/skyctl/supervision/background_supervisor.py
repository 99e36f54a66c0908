"""A run's supervisor without a terminal: ``python -m skyctl.supervision.background_supervisor RUN_ID``.

``start_background`` starts it, when a user detaches or a terminal closes. Its output goes to the run's
``supervisor.log``. SIGTERM, which a machine sends that shuts down, leaves the run to whoever attaches to it
next; its nodes train on meanwhile.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeAlias

from skyctl.errors import InputError, SkyctlError
from skyctl.files import RunPaths, read_record
from skyctl.records.run_state import ENDED, RunState
from skyctl.run.callbacks import RunCallbacks, StepProgress
from skyctl.run.live_run import LiveRun
from skyctl.run.run_lock import RunLock, acquire_run_lock
from skyctl.run.wandb_writer import WANDB_SERVICE
from skyctl.supervision.opened_runs import OnDetach
from skyctl.supervision.run_logs import FileTail, log_supervisor, parse_supervisor_line
from skyctl.terminal import silence_output

if TYPE_CHECKING:
    from skyctl.records.measurement import Measurement
    from skyctl.run.scripts.script_outcome import ScriptOutcome

# Going away from a run that is to go on: what asks for it beside an answer to Ctrl-C.


class DetachRequest:
    """Notes that the run is to be left to a background process, as soon as it trains.

    Args:
        wanted: from the beginning (``--detach``).
    """

    def __init__(self, *, wanted: bool = False) -> None:
        self.wanted = wanted

    def beside(self, callbacks: RunCallbacks) -> RunCallbacks:
        """The same callbacks, which answer ``detach`` when that is wanted."""

        def step(progress: StepProgress) -> None:
            callbacks.step(progress)
            if self.wanted:
                self._be_asked()

        def begun() -> None:
            callbacks.begun()
            if self.wanted:
                self._be_asked()

        def interrupted() -> str:
            answer = "detach" if self.wanted else callbacks.interrupted()
            return "detach" if self.wanted else answer  # the terminal may have closed at the question

        return replace(callbacks, begun=begun, step=step, interrupted=interrupted)

    @contextmanager
    def on(self, signals: Sequence[signal.Signals]) -> Iterator[None]:
        """While the context lasts, these signals ask to detach. Ignored ones (nohup) stay ignored.

        A closed terminal (SIGHUP) reads no more: what is shown goes nowhere from then on.
        """

        def leave(signum: int, _frame: FrameType | None) -> None:
            self.wanted = True
            if signum == signal.SIGHUP:
                silence_output()
            self._be_asked()

        before: dict[int, Any] = {}
        with suppress(ValueError):  # not the main thread
            for signum in signals:
                if signal.getsignal(signum) is not signal.SIG_IGN:
                    before[signum] = signal.signal(signum, leave)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @staticmethod
    def _be_asked() -> None:
        """Raises SIGINT where Ctrl-C is handled as an event; before the run trains it would end it."""
        if signal.getsignal(signal.SIGINT) not in (
            signal.default_int_handler,
            signal.SIG_IGN,
            signal.SIG_DFL,
        ):
            signal.raise_signal(signal.SIGINT)


LOCK_WAIT_S = 30.0
STEP_EVERY_S = 60.0
"""How often a step is mentioned; all of them stand in ``metrics.jsonl``."""


def supervisor_log_callbacks(paths: RunPaths) -> RunCallbacks:
    """Callbacks that log a step now and then; ``with_supervisor_log`` logs all the rest."""
    said_at = float("-inf")

    def step(progress: StepProgress) -> None:
        nonlocal said_at
        if time.monotonic() - said_at >= STEP_EVERY_S or progress.step + 1 == progress.steps:
            said_at = time.monotonic()
            log_supervisor(
                paths.supervisor_log,
                "note",
                f"{progress.unit} {progress.step + 1} of {progress.steps} · loss {progress.loss:.4f} "
                f"· {progress.iteration_s:.3f} s",
            )

    return RunCallbacks(step=step, interrupted=lambda: "go on")


RunEnd: TypeAlias = "tuple[Measurement, RunPaths] | ScriptOutcome"
"""How a run has ended that ended well: of a plan, or of a script."""


def take_over_any(lock: RunLock, callbacks: RunCallbacks, detach: OnDetach) -> RunEnd | None:
    """As ``plan_supervision.take_over`` or ``script_supervision.take_over_script``, by what the run is of."""
    if read_record(RunState, lock.paths.state).is_script:
        from skyctl.supervision.script_supervision import take_over_script

        return take_over_script(lock, callbacks, detach)
    from skyctl.supervision.plan_supervision import take_over

    return take_over(lock, callbacks, detach)


def supervise_in_background(run_id: str) -> int:
    """Supervises a run in this process until it has ended, or SIGTERM has it left to others.

    Writes to its ``supervisor.log``; prints nothing.

    Returns:
        The exit code: 0, that of the run's error, or 143 after SIGTERM.
    """

    paths = RunPaths(run_id)
    leaving = DetachRequest()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ``leaving`` goes by it
    try:
        with (
            acquire_run_lock(paths, attached=False, wait_s=LOCK_WAIT_S) as lock,
            leaving.on((signal.SIGTERM,)),
        ):
            if lock.run_ended:
                log_supervisor(paths.supervisor_log, "note", "it ended before this process took it over")
                return 0
            callbacks = leaving.beside(supervisor_log_callbacks(paths))
            over = take_over_any(lock, callbacks, LiveRun.leave)
        if over is None:
            log_supervisor(
                paths.supervisor_log, "note", "this process was told to end; the run goes on on its nodes"
            )
            return 128 + signal.SIGTERM
    except KeyboardInterrupt as exc:
        log_supervisor(paths.supervisor_log, "note", "; ".join(["stopped", *getattr(exc, "__notes__", ())]))
        return 0
    except SkyctlError as exc:
        log_supervisor(paths.supervisor_log, "error", str(exc))
        return exc.exit_code
    except BaseException:
        log_supervisor(paths.supervisor_log, "error", traceback.format_exc())
        raise
    return 0


# Handing a run over to a process in the background, which goes on supervising it.

BACKGROUND_MODULE = "skyctl.supervision.background_supervisor"
TAKE_OVER_WAIT_S = 120.0
"""The process in the background has to import what we have imported, and to go back to every node."""
LOOK_S = 0.1


def hand_over(run: LiveRun, say: Callable[[str], None]) -> int:
    """Leaves the run, starts a process that takes it over, and waits until it has.

    Returns:
        its pid.

    Raises:
        SkyctlError: it did not take it over. The run goes on on its nodes, without a supervisor.
    """
    say("handing over to a process in the background")
    paths = run.journal.paths
    run.leave()
    return start_background(paths)


def start_background(paths: RunPaths) -> int:
    """Starts a supervisor in the background for a run that nobody supervises; its pid. See ``hand_over``."""
    said = FileTail(paths.supervisor_log, 0)
    try:
        fd = os.open(paths.supervisor_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            # Nothing of this process but its environment: not its terminal, folder, or open files.
            child = subprocess.Popen(
                [sys.executable, "-P", "-m", BACKGROUND_MODULE, paths.run_id],
                stdin=subprocess.DEVNULL,
                stdout=fd,
                stderr=fd,
                cwd="/",
                env=_environment(),
                start_new_session=True,
            )
        finally:
            os.close(fd)
    except OSError as exc:
        raise _handover_error(paths, f"no process could be started: {exc.strerror or exc}") from exc
    deadline = time.monotonic() + TAKE_OVER_WAIT_S
    while time.monotonic() < deadline:
        ended = child.poll() is not None
        with suppress(InputError):
            state = read_record(RunState, paths.state)
            if state.status in ENDED or (state.supervisor is not None and state.supervisor.pid == child.pid):
                return child.pid
        if ended:
            words = [
                f"{line.kind}: {line.text}".lstrip(": ")
                for line in map(parse_supervisor_line, said.lines()[-4:])
            ]
            raise _handover_error(paths, "; ".join(words) or f"it ended with status {child.returncode}")
        time.sleep(LOOK_S)
    raise _handover_error(paths, f"it has not taken the run over within {TAKE_OVER_WAIT_S:.0f} s")


def _environment() -> dict[str, str]:
    """This process's, without the address of the W&B service that ends with it."""
    own = {**os.environ, "PYTHONPATH": os.pathsep.join(_python_path())}
    own.pop(WANDB_SERVICE, None)
    return own


def _python_path() -> list[str]:
    """PYTHONPATH, as seen from here: the process runs in another folder."""
    paths = os.environ.get("PYTHONPATH", "")
    return [os.path.abspath(path) for path in paths.split(os.pathsep) if path]  # noqa: PTH100


def _handover_error(paths: RunPaths, why: str) -> SkyctlError:
    return SkyctlError(
        f"the process in the background did not take run {paths.run_id} over: {why}",
        hint=f"the run goes on on its nodes without a supervisor: skyctl attach {paths.run_id}, "
        f"or skyctl stop {paths.run_id}",
        log=str(paths.supervisor_log),
    )


if __name__ == "__main__":
    sys.exit(supervise_in_background(sys.argv[1]))
