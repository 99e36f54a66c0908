"""Ending a run: by its supervisor, or by this process where it has none."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from skyctl.errors import InputError, NodeError, SkyctlError
from skyctl.records.run_state import ENDED, RunState
from skyctl.run.callbacks import RunCallbacks
from skyctl.run.live_run import LiveRun
from skyctl.run.operator_requests import StopRunRequest, leave_request, take_requests
from skyctl.run.run_lock import acquire_run_lock, end_supervisor
from skyctl.supervision.left_tasks import ranks_of, unreached_nodes
from skyctl.supervision.opened_runs import taken_over_run
from skyctl.supervision.run_status import InspectedRun, counted_unit, inspect_run

REQUEST_TAKEN_S = 20.0
"""A supervisor that has not taken up a request by then does not answer."""
RUN_ENDED_S = 240.0
"""From there to the end: a last checkpoint, and the agents' good-byes."""
RUN_ENDED_STEPS = 5.0
"""Or so many steps' time, where that is longer."""
KILL_S = 10.0
POLL_S = 0.1


@dataclass
class StopResult:
    """The outcome of a request to stop a run.

    Attributes:
        step: of the newest checkpoint.
        already: it had ended before.
        unreached: by node that could not be told, what may still run there.
    """

    run_id: str
    status: str
    step: int | None
    already: bool = False
    unreached: dict[str, str] = field(default_factory=dict)


def stop_run(run: InspectedRun, callbacks: RunCallbacks, *, checkpoint: bool) -> StopResult:
    """Ends the run and waits until no node that answers has anything left of it.

    Args:
        checkpoint: its state is kept first.

    Raises:
        SkyctlError: its supervisor does not end it, and does not end itself.
    """
    if run.ended and not run.state.sessions:
        return StopResult(run.paths.run_id, run.state.status, run.state.checkpoint, already=True)
    if run.supervisor_state == "alive":
        _stop_by_supervisor(run, callbacks, checkpoint=checkpoint)
        run = inspect_run(run.paths.run_id)
        if run.ended and not run.state.sessions:
            return StopResult(run.paths.run_id, run.state.status, run.state.checkpoint)
    return _stop_from_here(run, callbacks, checkpoint=checkpoint)


def _stop_by_supervisor(run: InspectedRun, callbacks: RunCallbacks, *, checkpoint: bool) -> None:
    """Returns when the run has ended, or has no supervisor any more."""
    paths, unit = run.paths, counted_unit(run.paths)
    request = leave_request(paths, StopRunRequest(checkpoint))
    try:
        callbacks.phase("asking its supervisor to end it")
        taken_by = time.monotonic() + REQUEST_TAKEN_S
        ended_by = taken_by + max(RUN_ENDED_S, RUN_ENDED_STEPS * (run.state.iteration_s or 0.0))
        while time.monotonic() < ended_by:
            now = inspect_run(paths.run_id)
            if now.supervisor_state != "alive":
                return
            if time.monotonic() > taken_by and request.exists():
                break
            if not request.exists():
                callbacks.phase(
                    now.state.status
                    if now.state.is_script
                    else f"{now.state.status}, {unit} {now.state.step} of {now.state.steps}"
                )
            time.sleep(POLL_S)
        if run.supervisor is None:
            return
        callbacks.warn(f"its supervisor (process {run.supervisor.pid}) does not answer; it is ended")
        if not end_supervisor(run.supervisor, KILL_S):
            raise SkyctlError(
                f"the supervisor of run {paths.run_id}, process {run.supervisor.pid}, can't be ended",
                hint="end that process, then stop the run again",
            )
    finally:
        request.unlink(missing_ok=True)


def _stop_from_here(run: InspectedRun, callbacks: RunCallbacks, *, checkpoint: bool) -> StopResult:
    written = run.state.written
    with acquire_run_lock(run.paths, attached=True, wait_s=KILL_S) as lock:
        take_requests(run.paths)  # they were for the supervisor that is gone
        say_nothing = RunCallbacks().note  # the caller tells who could not be reached
        with taken_over_run(lock, say_nothing, callbacks.phase) as played:
            if not run.ended:
                if checkpoint:
                    with suppress(SkyctlError):
                        _keep_last_checkpoint(played, callbacks)
                callbacks.phase("ending what is on its nodes")
                if played.journal.state.status not in ENDED:
                    played.journal.update(status="stopped", detail=None)
            failures = unreached_nodes(played)
            state = played.journal.state
        for name, session in played.sessions.items():
            if session.shutdown_failure is not None:
                failures[name] = session.shutdown_failure
    return StopResult(
        state.run_id,
        state.status,
        state.checkpoint,
        already=run.ended,
        unreached={name: unreached_text(state, written, error) for name, error in failures.items()},
    )


def _keep_last_checkpoint(run: LiveRun, callbacks: RunCallbacks) -> None:
    """Has the ranks write a last checkpoint, where all of them are there."""
    tasks = ranks_of(run)
    if tasks is None:
        return
    leave_request(run.journal.paths, StopRunRequest())
    with suppress(KeyboardInterrupt):
        if run.journal.state.is_script:
            from skyctl.supervision.script_supervision import supervise_script

            supervise_script(run, callbacks, LiveRun.leave, tasks)
            return
        from skyctl.supervision.plan_supervision import plan_of, supervise_run

        supervise_run(run, plan_of(run), callbacks, LiveRun.leave, tasks)


def unreached_text(state: RunState, written: str, error: SkyctlError) -> str:
    """The sentence about a node that could not be told to end.

    Args:
        written: when its supervisor last wrote, so was there.
    """
    hold_s = hold_time_s(state)
    by = (datetime.fromisoformat(written) + timedelta(seconds=hold_s)).astimezone()
    return f"{error.message}; its agent ends all by itself, at the latest on {by:%Y-%m-%d at %H:%M}"


def hold_time_s(state: RunState) -> float:
    """Seconds that the run's agents wait for a launcher before they end."""
    connect = state.order.get("connect")
    try:
        return float(connect["hold_s"]) if isinstance(connect, dict) else 0.0
    except (KeyError, TypeError, ValueError):
        return 0.0


def refuse_unreached(stopped: list[StopResult]) -> None:
    """Raises NodeError where something may be left on a node."""
    lines = [
        f"\n  run {result.run_id}, node {name}: {why}"
        for result in stopped
        for name, why in result.unreached.items()
    ]
    if lines:
        node = next(name for result in stopped for name in result.unreached)
        raise NodeError(
            f"not every node could be told to end:{''.join(lines)}",
            node=node,
            hint="once they answer again, stop the run again to be sure",
        )


def choose_runs(
    names: list[str], find: Callable[[str | None], InspectedRun], running: list[InspectedRun], *, every: bool
) -> list[InspectedRun]:
    """The runs to be ended: those named, all that go on, or the one that goes on.

    Raises:
        InputError: it is not clear which.
    """
    if names and every:
        raise InputError("name the runs to stop, or give --all; not both")
    if names:
        return [find(name) for name in names]
    if every or len(running) <= 1:
        return running
    ids = ", ".join(run.paths.run_id for run in running)
    raise InputError(f"{len(running)} runs go on: {ids}", hint="name one of them, or give --all")
