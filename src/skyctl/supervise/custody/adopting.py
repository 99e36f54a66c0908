"""Going on with a run whose supervisor is gone, or has let it go: its ranks, or its last checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from skyctl.control.connect import need_all
from skyctl.control.learning import keep
from skyctl.errors import NodeError, RunError, SkyctlError, UnreachableError
from skyctl.files import RunPaths, read_record, write_atomic
from skyctl.launch.events import Detached, Watcher
from skyctl.records.cluster import split_device_id
from skyctl.records.measurement import Measurement
from skyctl.records.plan import Plan
from skyctl.remote.session import Task, open_sessions
from skyctl.supervise.attempts.playing import Adopted
from skyctl.supervise.attempts.supervising import Supervisor
from skyctl.supervise.custody.charge import Charge, taken
from skyctl.supervise.custody.orders import connect_of, options_of, request_of
from skyctl.supervise.custody.saying import kept
from skyctl.supervise.custody.supervisors import Claim

Detach = Callable[[Charge], object]
"""What becomes of a run that is to go on without this process."""


def take_over(held: Claim, watcher: Watcher, detach: Detach) -> tuple[Measurement, RunPaths] | None:
    """Supervises the run to its end; None where it was detached from.

    Raises:
        InputError: its files can't be read.
        SkyctlError: as ``Supervisor.run``.
    """
    told = kept(watcher, held.paths.supervisor_log)
    with taken(held, told.note, told.phase) as charge:
        for name, error in {**charge.failures, **charge.gone}.items():
            told.warn(f"node {name}: {error.message}")
        tasks = ranks_of(charge)
        if tasks is None and charge.failures and not _ended(charge):
            charge.leave()
            raise need_to_reach(charge)
        if tasks is None:
            step = charge.state.checkpoint
            how = f"it goes on from the checkpoint of step {step}" if step else "it begins again"
            told.note(f"not all of its ranks are there any more: {how}")
            _find_again(charge, told)
        end_tasks(charge, but=(tasks or {}).values())
        return supervised(charge, plan_of(charge), watcher, detach, tasks)


def supervised(
    charge: Charge,
    plan: Plan,
    watcher: Watcher,
    detach: Detach,
    tasks: dict[int, Task] | None = None,
) -> tuple[Measurement, RunPaths] | None:
    """Plays the run of the charge, as its state has it, to its end; None where it was detached from.

    Args:
        tasks: by rank, those of an attempt that goes on already.
    """
    state, ledger = charge.state, charge.ledger
    watcher = kept(watcher, ledger.paths.supervisor_log)
    supervisor = Supervisor(
        plan,
        charge.cluster,
        request_of(state),
        charge.sessions,
        options_of(state),
        watcher,
        ledger,
        connect=connect_of(state),
        resume=tasks is None and bool(state.attempts),
    )
    adopted = Adopted(tasks, ledger.past(), ledger.reported) if tasks is not None else None
    try:
        done, paths = supervisor.run(adopted)
    except Detached:
        detach(charge)
        return None
    played = read_record(Plan, paths.newest_plan)
    digest = state.order.get("digest")
    as_measured = played.encrypted or not options_of(state).encrypt
    learned = isinstance(digest, str) and done.attempts == 1 and as_measured
    if learned and (seen := keep(charge.cluster.name, played, str(digest), done)) is not None:
        watcher.note(seen)
    if output := state.order.get("output"):
        write_atomic(Path(str(output)), done.to_json(), mode=None)
    return done, paths


def _ended(charge: Charge) -> bool:
    """Whether some rank is known to have ended. A node that can't be reached says nothing of its ranks."""
    if charge.state.status not in ("running", "stopping") or not charge.state.attempts:
        return bool(charge.sessions)
    nodes = _nodes(charge)
    if any(node in charge.gone for node in nodes):
        return True
    found = charge.ranks(nodes)
    return any(node in charge.sessions and (r not in found or found[r].done) for r, node in enumerate(nodes))


def _nodes(charge: Charge) -> list[str]:
    """Of the last attempt, by rank."""
    return [split_device_id(device)[0] for device in charge.state.attempts[-1].devices]


def need_to_reach(charge: Charge) -> NodeError:
    """The run may be well, and is left as it is."""
    names = ", ".join(charge.failures)
    return UnreachableError(
        f"run {charge.run_id} can't be taken over: {names} can't be reached, and nothing says that its ranks "
        "have ended; it is left as it is",
        node=next(iter(charge.failures)),
        hint=f"see whether your network or VPN is up, then: skyctl attach {charge.run_id}",
    )


def _find_again(charge: Charge, watcher: Watcher) -> None:
    """New sessions with the nodes whose old ones have ended."""
    nodes = [node for node in charge.cluster.nodes if node.name in charge.gone]
    if not nodes:
        return
    watcher.phase(f"connecting to {len(nodes)} nodes anew")
    for name, outcome in open_sessions(nodes, connect_of(charge.state)).items():
        if isinstance(outcome, SkyctlError):
            watcher.warn(f"node {name}: {outcome.message}")
        else:
            charge.sessions[name] = outcome
    charge.note_sessions()
    if not charge.sessions:
        need_all({**charge.failures, **charge.gone})


def plan_of(charge: Charge) -> Plan:
    """The plan of the last attempt. Raises RunError where the run had none yet."""
    paths = charge.ledger.paths
    found = next((path for path in (paths.plan, paths.newest_plan) if path.is_file()), None)
    if found is None:
        raise RunError(
            f"run {paths.run_id} had no plan yet when its supervisor went: there is nothing to go on with, "
            "and it is ended",
            hint="launch it again",
        )
    return read_record(Plan, found)


def ranks_of(charge: Charge) -> dict[int, Task] | None:
    """By rank, the tasks of the last attempt, where it trains and all can still be heard; else None."""
    if charge.state.status not in ("running", "stopping") or not charge.state.attempts:
        return None
    nodes = _nodes(charge)
    found = charge.ranks(nodes)
    known = {r for r, event in charge.ledger.past() if event.get("event") in ("result", "error", "exit")}
    for rank in range(len(nodes)):
        task = found.get(rank)
        # One that has ended meanwhile may still have to say what with.
        if task is None or (task.done and rank not in known):
            return None
    return found


def end_tasks(charge: Charge, but: Iterable[Task] = ()) -> None:
    """Ends what the last supervisor has left there: keepers, whose secret was its own, and the like.

    What they had still said is written down.
    """
    kept_ = {id(task) for task in but}
    for name, session in charge.sessions.items():
        for task in session.tasks():
            if id(task) in kept_:
                continue
            with suppress(SkyctlError):
                if not task.ended:
                    task.kill()
                while (said := task.recv(0.0)) is not None:
                    charge.ledger.heard(name, task.name, said[0])
            session.discard(task)
