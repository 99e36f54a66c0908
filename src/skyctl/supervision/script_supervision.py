"""Supervising the run of a script, here or in the background, and taking it over. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping

from skyctl.errors import RunError
from skyctl.files import json_line, write_atomic
from skyctl.jobs.node_sessions import require_all
from skyctl.remote.remote_task import RemoteTask
from skyctl.run.callbacks import Detached, RunCallbacks
from skyctl.run.live_run import LiveRun
from skyctl.run.run_lock import RunLock
from skyctl.run.scripts.script_outcome import ScriptOutcome
from skyctl.run.scripts.script_runner import ScriptRunner
from skyctl.supervision.left_tasks import end_tasks, ranks_of
from skyctl.supervision.opened_runs import OnDetach, taken_over_run
from skyctl.supervision.run_logs import with_supervisor_log
from skyctl.supervision.run_settings import script_of


def take_over_script(lock: RunLock, callbacks: RunCallbacks, detach: OnDetach) -> ScriptOutcome | None:
    """Supervises a script's run to its end; None where it was detached from.

    Args:
        lock: of a run that has not ended. It may have while the lock was waited for (``RunLock.run_ended``).

    Raises:
        RunError: not all of its ranks are there any more.
        SkyctlError: as ``ScriptRunner.run``.
    """
    logged = with_supervisor_log(callbacks, lock.paths.supervisor_log)
    with taken_over_run(lock, logged.note, logged.phase) as run:
        for name, error in run.missing.items():
            logged.warn(f"node {name}: {error.message}")
        if (
            script_of(run.journal.state).balance_steps is not None
        ):  # it was only being timed: that begins anew
            end_tasks(run)
            require_all(run.missing)
            return supervise_script(run, callbacks, detach)
        tasks = ranks_of(run)
        if tasks is None:
            raise _ranks_gone_error(run)
        end_tasks(run, but=tasks.values())
        return supervise_script(run, callbacks, detach, tasks)


def supervise_script(
    run: LiveRun,
    callbacks: RunCallbacks,
    detach: OnDetach,
    tasks: Mapping[int, RemoteTask] | None = None,
) -> ScriptOutcome | None:
    """Plays the run of a script to its end, as its state describes it; None where it was detached from.

    Args:
        tasks: by rank, those of an attempt that goes on already.
    """
    journal = run.journal
    run.callbacks = with_supervisor_log(callbacks, journal.paths.supervisor_log)
    try:
        done = ScriptRunner(run, script_of(journal.state)).run(tasks)
    except Detached:
        detach(run)
        return None
    write_atomic(journal.paths.outcome, json_line(done.to_json()))
    return done


def _ranks_gone_error(run: LiveRun) -> RunError:
    return RunError(
        f"not all ranks of run {run.run_id} are there any more, and what they have done is not known: "
        "the run is ended",
        hint=f"begin it anew: skyctl run {run.journal.state.workload}",
        log=str(run.journal.paths.folder),
    )
