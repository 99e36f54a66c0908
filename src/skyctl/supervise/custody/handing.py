"""Handing a run over to a process in the background, which goes on supervising it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress

from skyctl.errors import InputError, SkyctlError
from skyctl.files import RunPaths, read_record
from skyctl.records.run import ENDED, RunState
from skyctl.supervise.custody.charge import Charge
from skyctl.supervise.custody.following import Tail
from skyctl.supervise.custody.saying import parse

MODULE = "skyctl.supervise.custody.background"
TAKES_S = 120.0
"""The process in the background has to import what we have imported, and to go back to every node."""
LOOK_S = 0.1


def hand_over(charge: Charge, say: Callable[[str], None]) -> int:
    """Leaves the run, starts a process that takes it over, and waits until it has.

    Returns:
        its pid.

    Raises:
        SkyctlError: it did not take it over. The run goes on on its nodes, without a supervisor.
    """
    say("handing over to a process in the background")
    paths = charge.ledger.paths
    charge.leave()
    return start_background(paths)


def start_background(paths: RunPaths) -> int:
    """Starts a supervisor in the background for a run that nobody supervises; its pid. See ``hand_over``."""
    said = Tail(paths.supervisor_log, 0)
    try:
        fd = os.open(paths.supervisor_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            # Nothing of this process but its environment: not its terminal, folder, or open files.
            child = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE, paths.run_id],
                stdin=subprocess.DEVNULL,
                stdout=fd,
                stderr=fd,
                cwd="/",
                env={**os.environ, "PYTHONPATH": os.pathsep.join(_python_path())},
                start_new_session=True,
            )
        finally:
            os.close(fd)
    except OSError as exc:
        raise _left_alone(paths, f"no process could be started: {exc.strerror or exc}") from exc
    deadline = time.monotonic() + TAKES_S
    while time.monotonic() < deadline:
        ended = child.poll() is not None
        with suppress(InputError):
            state = read_record(RunState, paths.state)
            if state.status in ENDED or (state.supervisor is not None and state.supervisor.pid == child.pid):
                return child.pid
        if ended:
            words = [f"{one.kind}: {one.text}".lstrip(": ") for one in map(parse, said.lines()[-4:])]
            raise _left_alone(paths, "; ".join(words) or f"it ended with status {child.returncode}")
        time.sleep(LOOK_S)
    raise _left_alone(paths, f"it has not taken the run over within {TAKES_S:.0f} s")


def _python_path() -> list[str]:
    """PYTHONPATH, as seen from here: the process runs in another folder."""
    known = os.environ.get("PYTHONPATH", "")
    return [os.path.abspath(path) for path in known.split(os.pathsep) if path]  # noqa: PTH100


def _left_alone(paths: RunPaths, why: str) -> SkyctlError:
    return SkyctlError(
        f"the process in the background did not take run {paths.run_id} over: {why}",
        hint=f"the run goes on on its nodes without a supervisor: skyctl attach {paths.run_id}, "
        f"or skyctl stop {paths.run_id}",
        log=str(paths.supervisor_log),
    )
