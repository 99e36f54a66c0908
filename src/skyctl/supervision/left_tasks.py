"""What the supervisor before has left on nodes: the ranks of its last attempt, and tasks of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from skyctl.checkpoint.launcher.replicator_messages import REPLICATOR_KINDS
from skyctl.errors import ProtocolError, SkyctlError
from skyctl.records.cluster import Node, split_device_id
from skyctl.remote.remote_task import RemoteTask, read_task_message
from skyctl.run.rank_messages import RANK_KINDS
from skyctl.run.rank_spec import rank_of_task
from skyctl.supervision.run_handle import RunHandle


def nodes_by_rank(handle: RunHandle) -> list[str]:
    """The nodes of the last attempt, by rank."""
    return [split_device_id(device)[0] for device in handle.state.attempts[-1].devices]


def ranks_of(handle: RunHandle) -> dict[int, RemoteTask] | None:
    """By rank, the tasks of the last attempt, where it trains and all can still be heard; else None."""
    if handle.state.status not in ("running", "stopping") or not handle.state.attempts:
        return None
    nodes = nodes_by_rank(handle)
    found = handle.ranks(nodes)
    known = {r for r, event in handle.journal.past() if event.get("event") in ("result", "error", "exit")}
    for rank in range(len(nodes)):
        task = found.get(rank)
        # One that has ended meanwhile may still have to say what with.
        if task is None or (task.done and rank not in known):
            return None
    return found


def end_tasks(handle: RunHandle, but: Iterable[RemoteTask] = ()) -> None:
    """Ends what the last supervisor has left on nodes, such as replicators, whose secret was its own.

    What they had still said is written down.
    """
    kept_ = {id(task) for task in but}
    for name, session in handle.sessions.items():
        for task in session.tasks():
            if id(task) in kept_:
                continue
            with suppress(SkyctlError):
                if not task.ended:
                    task.kill()
                while (said := task.recv(0.0)) is not None:
                    try:
                        handle.journal.heard(
                            name, task.name, _plain_message(session.node, task.name, said[0])
                        )
                    except ProtocolError:  # nothing of it is kept
                        session.acknowledge(said[0].get("seq", 0))
            session.discard(task)


def _plain_message(node: Node, task: str, message: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a task of a run has said, with nothing in it that nobody knows. Raises ProtocolError."""
    kinds = REPLICATOR_KINDS if rank_of_task(task) is None else RANK_KINDS
    return read_task_message(kinds, node, message).plain
