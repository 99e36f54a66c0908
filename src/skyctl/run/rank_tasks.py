"""The processes of an attempt's ranks on their nodes: started, heard in one line with Ctrl-C, told, ended."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from skyctl.agent.task_orders import write_order, write_request
from skyctl.errors import SkyctlError
from skyctl.remote.agent_session import Session
from skyctl.remote.remote_task import RemoteTask
from skyctl.remote.task_group import GroupEvent, TaskGroup
from skyctl.run.callbacks import Detached
from skyctl.run.rank_spec import rank_task_name

INTERRUPT = -1
"""Ctrl-C's place among the ranks whose events come."""
POLL_S = 0.02


class RankTasks:
    """The ranks, each a task on its node; for one thread.

    Attributes:
        sessions: by node, its newest.

    Args:
        name: of the module's kind, for threads.
        sessions: by node; kept as they are now, for a node that is given up still has to be told.
        answer: what is to become of the run at Ctrl-C: "stop", "detach" or "go on".
    """

    def __init__(self, name: str, sessions: Mapping[str, Session], answer: Callable[[], str]) -> None:
        self.sessions, self._answer = dict(sessions), answer
        self._tasks: dict[int, tuple[str, Session, RemoteTask]] = {}
        self._events: TaskGroup[int] = TaskGroup(name)
        self._is_asking = self._is_killed = False

    def start(self, node: str, module: str, order: Any) -> None:
        """Starts the next rank as a task on that node: the first is 0.

        Args:
            module: what the task runs, as in ``skyctl.worker.rank``.
            order: a record of ``worker.rank_order``, with its secrets.

        Raises:
            SkyctlError: the node is lost, or can't start it.
        """
        self.start_rank(max(self._tasks, default=-1) + 1, node, module, order)

    def start_rank(self, rank: int, node: str, module: str, order: Any) -> None:
        """As ``start``, of that rank."""
        task = self.sessions[node].start_task(module, write_order(order), name=rank_task_name(rank))
        self.adopt(rank, node, task)

    def adopt(self, rank: int, node: str, task: RemoteTask) -> None:
        """In place of ``start``: takes over a task that runs already as that rank."""
        self._tasks[rank] = node, self.sessions[node], task
        self._events.follow(rank, task)

    def send(self, rank: int, request: Any) -> None:
        """Tells a rank something. Raises UnreachableError: its node is lost."""
        _, _, task = self._tasks[rank]
        task.send(write_request(request))

    def receive(self, timeout_s: float, *, asks: bool = True) -> GroupEvent[int] | None:
        """The next that comes of a rank; None: nothing does in time.

        Args:
            asks: at Ctrl-C it is asked what is to become of the run; else Ctrl-C is passed over.

        Raises:
            KeyboardInterrupt: it is to end (``Detached``: it goes on without this process).
        """
        while (came := self._events.receive(timeout_s)) is not None and came.key == INTERRUPT:
            if asks:
                self._ask()
        return came

    @contextmanager
    def interrupts_as_events(self) -> Iterator[None]:
        """While it lasts, SIGINT is an event; only in the main thread, and where it is Python's own."""
        ours = (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        )
        if ours:
            signal.signal(signal.SIGINT, self._post)
        try:
            yield
        finally:
            if ours:
                signal.signal(signal.SIGINT, signal.default_int_handler)

    def kill(self) -> None:
        """Ends every rank that still runs. Idempotent; errors of dead connections don't matter here."""
        if self._is_killed:
            return
        self._is_killed = True
        for rank in self._tasks:
            self.kill_rank(rank)

    def kill_rank(self, rank: int) -> None:
        """Ends one rank, if it still runs; errors of dead connections don't matter here."""
        _, _, task = self._tasks.get(rank, (None, None, None))
        if task is not None and not task.done:
            with suppress(SkyctlError, OSError):
                task.kill()

    def is_of_old_session(self, rank: int) -> bool:
        """Whether its node has another session since: what it still says is nobody's."""
        node, session, _ = self._tasks[rank]
        return self.sessions[node] is not session

    def wait_gone(
        self, limit_s: float, lost: Collection[str], take: Callable[[GroupEvent[int]], None]
    ) -> None:
        """After ``kill``: until every rank has ended on its node, those on ``lost`` nodes left out.

        Args:
            take: gets what they had still said by then.
        """
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline and any(
            not task.done and node not in lost and session.is_waited_for
            for node, session, task in self._tasks.values()
        ):
            self._drain(take, POLL_S)
        self._drain(take)
        for _, session, task in self._tasks.values():
            session.discard(task)
        self._drain(take)

    def _drain(self, take: Callable[[GroupEvent[int]], None], wait_s: float = 0) -> None:
        """Takes in all that has come, once anything has within ``wait_s``."""
        while (came := self.receive(wait_s, asks=False)) is not None:
            take(came)
            wait_s = 0

    def _ask(self) -> None:
        """Asks what is to become of the run; another Ctrl-C meanwhile ends the question."""
        self._is_asking = True
        try:
            answer = self._answer()
        finally:
            self._is_asking = False
        if answer != "go on":
            raise Detached if answer == "detach" else KeyboardInterrupt

    def _post(self, signum: int, frame: Any) -> None:
        if self._is_asking:
            signal.default_int_handler(signum, frame)
        self._events.post(INTERRUPT)
