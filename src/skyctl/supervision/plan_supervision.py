"""Supervising the run of a plan to its end, here or in the background, and taking it over."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from skyctl.errors import NodeError, RunError, SkyctlError, UnreachableError
from skyctl.files import RunPaths, read_record, write_atomic
from skyctl.jobs.node_sessions import require_all
from skyctl.learning.corrections import Subject
from skyctl.learning.observations import add_observations, keep_observations
from skyctl.records.measurement import Measurement
from skyctl.records.plan import Plan
from skyctl.remote.remote_task import RemoteTask
from skyctl.remote.session_factory import open_sessions
from skyctl.run.callbacks import Detached, RunCallbacks
from skyctl.run.live_run import LiveRun
from skyctl.run.plan_runner import PlanRunner
from skyctl.run.run_lock import RunLock
from skyctl.supervision.left_tasks import (
    end_tasks,
    expert_hosts_of,
    gone_nodes,
    ranks_of,
    some_rank_ended,
    unreached_nodes,
)
from skyctl.supervision.opened_runs import OnDetach, note_sessions, taken_over_run
from skyctl.supervision.run_logs import with_supervisor_log
from skyctl.supervision.run_settings import connect_of, options_of, request_of


def take_over(
    lock: RunLock, callbacks: RunCallbacks, detach: OnDetach, ready: Callable[[], None] = lambda: None
) -> tuple[Measurement, RunPaths] | None:
    """Supervises the run to its end; None where it was detached from.

    Args:
        lock: of a run that has not ended. It may have while the lock was waited for (``RunLock.run_ended``).
        ready: called once the run's sessions are this process's: what it raises ends the run.

    Raises:
        InputError: its files can't be read.
        SkyctlError: as ``PlanRunner.run``.
    """
    logged = with_supervisor_log(callbacks, lock.paths.supervisor_log)
    with taken_over_run(lock, logged.note, logged.phase) as run:
        for name, error in run.missing.items():
            logged.warn(f"node {name}: {error.message}")
        tasks, unreached = ranks_of(run), unreached_nodes(run)
        if tasks is None and unreached and not some_rank_ended(run):
            run.leave()
            raise _unreached_error(run, list(unreached))
        ready()
        if tasks is None:
            step = run.journal.state.checkpoint
            how = f"it goes on from the checkpoint of step {step}" if step else "it begins again"
            logged.note(f"not all of its ranks are there any more: {how}")
            _reconnect_gone_nodes(run, logged)
        hosts = expert_hosts_of(run) if tasks else {}
        end_tasks(run, but=(*(tasks or {}).values(), *hosts.values()))
        return supervise_run(run, plan_of(run), callbacks, detach, tasks, hosts)


def supervise_run(
    run: LiveRun,
    plan: Plan,
    callbacks: RunCallbacks,
    detach: OnDetach,
    tasks: dict[int, RemoteTask] | None = None,
    hosts: dict[int, RemoteTask] | None = None,
) -> tuple[Measurement, RunPaths] | None:
    """Plays the run to its end, as its state describes it; None where it was detached from.

    Args:
        tasks: by rank, those of an attempt that goes on already.
        hosts: of its experts, by their places.
    """
    state = run.journal.state
    run.callbacks = with_supervisor_log(callbacks, run.journal.paths.supervisor_log)
    digest, options = state.order.get("digest"), options_of(state)

    # with others' turns steps last longer, and with hosts of experts layers take other times
    is_alone = options.turns is None and options.experts is None

    def as_measured(played: Plan) -> bool:
        return is_alone and (played.encrypted or not options.encrypt)

    def keep_part(played: Plan, seen: Measurement, part: Subject) -> bool:
        if not isinstance(digest, str) or not as_measured(played):
            return False
        with suppress(SkyctlError):  # at the run's end it is said what could not be kept
            return add_observations(run.cluster.name, played, digest, seen, part) is not None
        return False

    runner = PlanRunner(
        run,
        plan,
        request_of(state),
        options,
        connect=connect_of(state),
        resume=tasks is None and bool(state.attempts),
        keep_part=keep_part if is_alone else None,
    )
    try:
        done, paths = runner.run(tasks, hosts)
    except Detached:
        detach(run)
        return None
    played = read_record(Plan, paths.newest_plan)
    learns = isinstance(digest, str) and done.attempts == 1 and as_measured(played)
    if learns and (seen := keep_observations(run.cluster.name, played, str(digest), done)) is not None:
        run.callbacks.note(seen)
    if output := state.order.get("output"):
        write_atomic(Path(str(output)), done.to_json(), mode=None)
    return done, paths


def plan_of(run: LiveRun) -> Plan:
    """The plan of the last attempt; RunError where the run had none yet."""
    paths = run.journal.paths
    path = next((path for path in (paths.plan, paths.newest_plan) if path.is_file()), None)
    if path is None:
        raise RunError(
            f"run {paths.run_id} had no plan yet when its supervisor went: there is nothing to go on with, "
            "and it is ended",
            hint="launch it again",
        )
    return read_record(Plan, path)


def _unreached_error(run: LiveRun, nodes: list[str]) -> NodeError:
    """The error where a run may be training on nodes that can't be reached, and is left as it is."""
    return UnreachableError(
        f"run {run.run_id} can't be taken over: {', '.join(nodes)} can't be reached, and nothing says that "
        "its ranks have ended; it is left as it is",
        node=nodes[0],
        hint=f"see whether your network or VPN is up, then: skyctl attach {run.run_id}",
    )


def _reconnect_gone_nodes(run: LiveRun, callbacks: RunCallbacks) -> None:
    """Opens new sessions with the nodes whose old ones have ended."""
    gone = gone_nodes(run)
    nodes = [node for node in run.cluster.nodes if node.name in gone]
    if not nodes:
        return
    callbacks.phase(f"connecting to {len(nodes)} nodes anew")
    for name, outcome in open_sessions(nodes, connect_of(run.journal.state)).items():
        if isinstance(outcome, SkyctlError):
            callbacks.warn(f"node {name}: {outcome.message}")
        else:
            run.sessions[name] = outcome
    note_sessions(run)
    if not run.sessions:
        require_all(run.missing)
