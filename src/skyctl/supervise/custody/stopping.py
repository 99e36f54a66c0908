"""Ending a run: by its supervisor, or by this process where it has none."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from skyctl.errors import InputError, NodeError, SkyctlError
from skyctl.launch.events import Watcher
from skyctl.records.run import ENDED, RunState
from skyctl.supervise.attempts.requests import ask, pending
from skyctl.supervise.custody.charge import Charge, taken
from skyctl.supervise.custody.runs import Seen, of
from skyctl.supervise.custody.supervisors import claim, end

TAKEN_S = 20.0
"""A supervisor that has not taken up a request by then does not answer."""
ENDED_S = 240.0
"""From there to the end: a last checkpoint, and the agents' good-byes."""
STEPS = 5.0
"""Or so many steps' time, where that is longer."""
KILL_S = 10.0
POLL_S = 0.1


@dataclass
class Stopped:
    """``step``: of the newest checkpoint. ``already``: it had ended before. ``unreached``: by node, what is
    known of what may still run there."""

    run_id: str
    status: str
    step: int | None
    already: bool = False
    unreached: dict[str, str] = field(default_factory=dict)


def stop(run: Seen, watcher: Watcher, *, checkpoint: bool) -> Stopped:
    """Ends the run and waits until nothing of it is left on any node that answers.

    Args:
        checkpoint: its state is kept first.

    Raises:
        SkyctlError: its supervisor does not end it, and does not end itself.
    """
    if run.ended and not run.state.sessions:
        return Stopped(run.paths.run_id, run.state.status, run.state.checkpoint, already=True)
    if run.standing == "alive":
        _by_its_supervisor(run, watcher, checkpoint=checkpoint)
        run = of(run.paths.run_id)
        if run.ended and not run.state.sessions:
            return Stopped(run.paths.run_id, run.state.status, run.state.checkpoint)
    return _by_us(run, watcher, checkpoint=checkpoint)


def _by_its_supervisor(run: Seen, watcher: Watcher, *, checkpoint: bool) -> None:
    """Returns when the run has ended, or has no supervisor any more."""
    paths = run.paths
    request = ask(paths, {"op": "stop", "checkpoint": checkpoint})
    try:
        watcher.phase("asking its supervisor to end it")
        taken_by = time.monotonic() + TAKEN_S
        ended_by = taken_by + max(ENDED_S, STEPS * (run.state.iteration_s or 0.0))
        while time.monotonic() < ended_by:
            now = of(paths.run_id)
            if now.standing != "alive":
                return
            if time.monotonic() > taken_by and request.exists():
                break
            if not request.exists():
                watcher.phase(f"{now.state.status}, step {now.state.step} of {now.state.steps}")
            time.sleep(POLL_S)
        if run.supervisor is None:
            return
        watcher.warn(f"its supervisor (process {run.supervisor.pid}) does not answer; it is ended")
        if not end(run.supervisor, KILL_S):
            raise SkyctlError(
                f"the supervisor of run {paths.run_id}, process {run.supervisor.pid}, can't be ended",
                hint="end that process, then stop the run again",
            )
    finally:
        request.unlink(missing_ok=True)


def _by_us(run: Seen, watcher: Watcher, *, checkpoint: bool) -> Stopped:
    written = run.state.written
    with claim(run.paths, attached=True, wait_s=KILL_S) as held:
        for path, _ in pending(run.paths):
            path.unlink(missing_ok=True)
        with taken(held, watcher.note, watcher.phase) as charge:
            if not run.ended:
                if checkpoint:
                    with suppress(SkyctlError):
                        _keep(charge, watcher)
                watcher.phase("ending what is on its nodes")
                if charge.state.status not in ENDED:
                    charge.ledger.update(status="stopped", detail=None)
            failures = dict(charge.failures)
            state = charge.state
        for name, session in charge.sessions.items():
            if session.unended is not None:
                failures[name] = session.unended
    return Stopped(
        state.run_id,
        state.status,
        state.checkpoint,
        already=run.ended,
        unreached={name: unreached(state, written, error) for name, error in failures.items()},
    )


def _keep(charge: Charge, watcher: Watcher) -> None:
    """Has the ranks write a last checkpoint, where all of them are there."""
    from skyctl.supervise.custody.adopting import plan_of, ranks_of, supervised

    tasks = ranks_of(charge)
    if tasks is None:
        return
    ask(charge.ledger.paths, {"op": "stop", "checkpoint": True})
    with suppress(KeyboardInterrupt):
        supervised(charge, plan_of(charge), watcher, Charge.leave, tasks)


def unreached(state: RunState, written: str, error: SkyctlError) -> str:
    """What is to be said of a node that could not be told to end.

    Args:
        written: when its supervisor last wrote, so was there.
    """
    hold_s = hold_of(state)
    by = (datetime.fromisoformat(written) + timedelta(seconds=hold_s)).astimezone()
    return f"{error.message}; its agent ends all by itself, at the latest on {by:%Y-%m-%d at %H:%M}"


def hold_of(state: RunState) -> float:
    """How long its agents hold, in seconds."""
    connect = state.order.get("connect")
    try:
        return float(connect["hold_s"]) if isinstance(connect, dict) else 0.0
    except (KeyError, TypeError, ValueError):
        return 0.0


def complain(stopped: list[Stopped]) -> None:
    """Raises NodeError where something may be left on a node."""
    lines = [
        f"\n  run {one.run_id}, node {name}: {why}" for one in stopped for name, why in one.unreached.items()
    ]
    if lines:
        node = next(name for one in stopped for name in one.unreached)
        raise NodeError(
            f"not every node could be told to end:{''.join(lines)}",
            node=node,
            hint="once they answer again, stop the run again to be sure",
        )


def choose(
    names: list[str], find: Callable[[str | None], Seen], running: list[Seen], *, every: bool
) -> list[Seen]:
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
