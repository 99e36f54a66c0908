"""The tasks that the last supervisor has left on nodes: its last attempt's ranks, and tasks of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from skyctl.checkpoint.launcher.replicator_messages import REPLICATOR_KINDS
from skyctl.errors import ProtocolError, SessionGoneError, SkyctlError
from skyctl.records.cluster import Node, node_of
from skyctl.remote.remote_task import RemoteTask, read_task_message
from skyctl.run.expert_hosts import HOST_KINDS, host_task_name, is_host_task
from skyctl.run.live_run import LiveRun
from skyctl.run.rank_messages import RANK_KINDS
from skyctl.run.rank_spec import rank_of_task, rank_task_name
from skyctl.worker.rank_events import MembersEvent, ReadyEvent


def gone_nodes(run: LiveRun) -> list[str]:
    """The names of nodes whose sessions have ended: all tasks of the run there have ended with them."""
    return [name for name, error in run.missing.items() if isinstance(error, SessionGoneError)]


def unreached_nodes(run: LiveRun) -> dict[str, SkyctlError]:
    """The nodes that could not be reached, and why: what runs there may go on."""
    return {name: error for name, error in run.missing.items() if not isinstance(error, SessionGoneError)}


def ranks_of(run: LiveRun) -> dict[int, RemoteTask] | None:
    """By rank, the tasks of the last attempt, where it trains and all can still be heard; else None.

    Ranks that the others go on without, and those that were still to enter, are left out.
    """
    if not _is_training(run):
        return None
    nodes = _nodes_by_rank(run)
    tasks, away = _newest_tasks(run, nodes), _away(run, len(nodes))
    ended = {r for r, event in run.journal.past() if event.get("event") in ("result", "error", "exit")}
    for rank in range(len(nodes)):
        if rank in away:
            tasks.pop(rank, None)
            continue
        task = tasks.get(rank)
        # One that has ended meanwhile may still have to say what with.
        if task is None or (task.done and rank not in ended):
            return None
    return tasks


def expert_hosts_of(run: LiveRun) -> dict[int, RemoteTask]:
    """By place, the tasks that host experts of the last attempt and still run; earlier ones were ended."""
    found: dict[int, RemoteTask] = {}
    for place, device in enumerate(run.journal.state.attempts[-1].expert_hosts):
        session = run.sessions.get(node_of(device))
        for task in session.tasks() if session is not None else ():
            if task.name == host_task_name(place) and not task.done:
                found[place] = task
    return found


def some_rank_ended(run: LiveRun) -> bool:
    """Whether some rank is known to have ended. A node that can't be reached says nothing of its ranks."""
    if not _is_training(run):
        return bool(run.sessions)
    nodes = _nodes_by_rank(run)
    away = _away(run, len(nodes))
    needed = {rank: node for rank, node in enumerate(nodes) if rank not in away}
    if not set(needed.values()).isdisjoint(gone_nodes(run)):
        return True
    tasks = _newest_tasks(run, nodes)
    return any(
        node in run.sessions and (rank not in tasks or tasks[rank].done) for rank, node in needed.items()
    )


def end_tasks(run: LiveRun, but: Iterable[RemoteTask] = ()) -> None:
    """Ends what the last supervisor has left on nodes, such as replicators, whose secret was its own.

    Their last messages are written down.
    """
    kept = {id(task) for task in but}
    for name, session in run.sessions.items():
        for task in session.tasks():
            if id(task) in kept:
                continue
            with suppress(SkyctlError):
                if not task.ended:
                    task.kill()
                while (received := task.recv(0.0)) is not None:
                    message, _ = received
                    try:
                        run.journal.heard(name, task.name, _plain_message(session.node, task.name, message))
                    except ProtocolError:  # nothing of it is kept
                        session.acknowledge(message.get("seq", 0))
            session.discard(task)


def _is_training(run: LiveRun) -> bool:
    state = run.journal.state
    return state.status in ("running", "stopping") and bool(state.attempts)


def _nodes_by_rank(run: LiveRun) -> list[str]:
    """The nodes of the last attempt, by rank."""
    return [node_of(device) for device in run.journal.state.attempts[-1].devices]


def _away(run: LiveRun, ranks: int) -> set[int]:
    """The ranks of the last attempt that make no steps: the others go on without them, or they are not in."""
    if run.journal.state.is_script:
        return set()
    ready, newest, members = set[int](), -1, set(range(ranks))
    for rank, event in run.journal.past():
        with suppress(KeyError, TypeError, ValueError):
            if event.get("event") == ReadyEvent.kind:
                ready.add(rank)
            elif event.get("event") == MembersEvent.kind and int(event["number"]) > newest:
                newest, members = int(event["number"]), set(map(int, event["members"]))
    return set(range(ranks)) - (members & ready)


def _newest_tasks(run: LiveRun, nodes: Iterable[str]) -> dict[int, RemoteTask]:
    """By rank, its newest task on its node; agents remember earlier ones."""
    tasks: dict[int, RemoteTask] = {}
    for rank, node in enumerate(nodes):
        session = run.sessions.get(node)
        name = rank_task_name(rank)
        named = [task for task in session.tasks() if task.name == name] if session else []
        if named:
            tasks[rank] = max(named, key=lambda task: task.number)
    return tasks


def _plain_message(node: Node, task: str, message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message of a task of a run, with nothing in it that nobody knows. Raises ProtocolError."""
    kinds = REPLICATOR_KINDS if rank_of_task(task) is None else RANK_KINDS
    if is_host_task(task):
        kinds = HOST_KINDS
    return read_task_message(kinds, node, message).plain
