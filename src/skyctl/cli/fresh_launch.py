"""``skyctl launch`` after it has started anew while its run trains (``supervision.fresh_start``)."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from skyctl.cli.command_output import Output
from skyctl.cli.command_runner import run_guarded
from skyctl.errors import UnreachableError

if TYPE_CHECKING:
    from skyctl.files import RunPaths
    from skyctl.records.measurement import Measurement
    from skyctl.run.callbacks import RunCallbacks, StepProgress
    from skyctl.run.run_lock import RunLock
    from skyctl.supervision.fresh_start import LeftRun
    from skyctl.supervision.opened_runs import OnDetach

AGAIN_S = 60.0
"""How long nodes are tried that can't be reached just now, though they could be a moment ago."""
PAUSE_S = 2.0


def find_left_run() -> LeftRun | None:
    """The run that this process has left before it started anew; None: there is none."""
    if "SKYCTL_LEFT_RUN" not in os.environ:  # before anything is imported for it
        return None
    from skyctl.supervision import fresh_start

    return fresh_start.find_left_run()


def go_on_launching(left: LeftRun) -> int:
    """Takes the run over again and supervises it as ``launch`` does; the exit code.

    Signals are blocked when it is called.
    """
    from skyctl.cli.run_display import take_over_on_terminal
    from skyctl.supervision.fresh_start import reap_children

    out = Output(as_json=left.as_json, quiet=left.quiet, verbose=left.verbose)

    def supervise() -> None:
        reap_children()
        take_over = partial(_take_over, left)
        take_over_on_terminal(out, left.lock(), "launch", (signal.SIGHUP,), take_over, yes=left.yes)

    return run_guarded(out, supervise)


def _take_over(
    left: LeftRun, lock: RunLock, callbacks: RunCallbacks, detach: OnDetach
) -> tuple[Measurement, RunPaths] | None:
    """As ``plan_supervision.take_over``, again and again while nodes can't be reached."""
    from skyctl.run.run_lock import acquire_run_lock
    from skyctl.supervision.fresh_start import HeldSignals
    from skyctl.supervision.plan_supervision import take_over

    callbacks, until = _quiet_at_first(callbacks), time.monotonic() + AGAIN_S
    with HeldSignals(left.signals()) as held:
        while True:
            try:
                with lock:
                    return take_over(lock, callbacks, detach, held.release)
            except UnreachableError:
                if held.released or held.noted or time.monotonic() > until:
                    raise
            time.sleep(PAUSE_S)
            lock = acquire_run_lock(lock.paths, attached=True)


def _quiet_at_first(callbacks: RunCallbacks) -> RunCallbacks:
    """The same callbacks, which are told nothing of a taking over that goes well: nobody asked for it."""
    begun = False

    def step(progress: StepProgress) -> None:
        nonlocal begun
        begun = True
        callbacks.step(progress)

    def warn(text: str) -> None:
        nonlocal begun
        begun = True
        callbacks.warn(text)

    def note(text: str) -> None:
        if begun:
            callbacks.note(text)

    def phase(text: str) -> None:
        if begun:
            callbacks.phase(text)

    return replace(callbacks, step=step, warn=warn, note=note, phase=phase)
