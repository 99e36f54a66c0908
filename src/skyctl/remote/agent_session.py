"""A session: a node's agent, and the tasks and files that it handles. ``session_factory`` opens them."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from skyctl.agent.frames import Message
from skyctl.agent.task_events import read_as_json
from skyctl.errors import NodeError, SessionGoneError, SkyctlError, UnreachableError
from skyctl.records.cluster import Node
from skyctl.remote.agent_connection import AgentConnection
from skyctl.remote.agent_messages import (
    AgentHello,
    AgentMessage,
    FileMessage,
    KnownTask,
    TaskEvent,
    TaskGone,
)
from skyctl.remote.base import CommandChannel, ConnectOptions, NodeConnection
from skyctl.remote.bootstrap import attach_agent
from skyctl.remote.file_transfers import FileTransfers
from skyctl.remote.remote_task import RemoteTask, translate_task_failure
from skyctl.remote.resumable_connection import DialledChannel, ResumableConnection

CLOSE_TIMEOUT_S = 12.0
MIN_DIAL_TIMEOUT_S = 5.0
Connector = Callable[[Node, ConnectOptions], NodeConnection]


class Session:
    """A running agent on a node. Threads may share it.

    ``hello``: what the agent said of its node when it was last connected. ``surviving_pids``: processes that
    the agent could not end, known after ``close``. ``shutdown_failure``: why the agent could not be told to
    end, known after ``close``: it will by itself. ``on_connection_change``: called with True when the
    connection is lost, with False when there is one again.
    """

    def __init__(
        self,
        node_connection: NodeConnection,
        channel: CommandChannel,
        hello: AgentHello,
        options: ConnectOptions,
        *,
        connector: Connector,
        owner: str,
        adopted: bool = False,
    ) -> None:
        self.node = node_connection.node
        self.host = node_connection.host
        self.hello = hello
        self.surviving_pids: list[int] = []
        self.shutdown_failure: SkyctlError | None = None
        self.on_connection_change: Callable[[bool], None] | None = None
        self._node_connections = [node_connection]
        self._node_connections_lock = threading.Lock()
        self._connector, self._options = connector, options
        self._owner, self._adopted = owner, adopted
        self._numbers = itertools.count(hello.highest + 1)
        self._close_lock = threading.Lock()
        self._closed = False
        self._connection = self._make_link(channel)
        self._transfers = FileTransfers(self._connection, lambda: next(self._numbers))
        self._tasks = {earlier.task: self._known_task(earlier) for earlier in hello.tasks}
        self._connection.start()

    def _make_link(self, channel: CommandChannel) -> AgentConnection:
        options, silence_s = self._options, (self.hello.lease_s or self._options.lease_s) / 2
        if not (options.hold_s or self._adopted):
            return AgentConnection(self.node, channel, self._receive, silence_s)
        return ResumableConnection(
            self.node,
            channel,
            self._receive,
            silence_s,
            hello=self.hello,
            dial=self._dial,
            redial_s=options.redial_s,
            manual_ack=options.manual_ack,
            on_change=self._report_change,
        )

    def _known_task(self, earlier: KnownTask) -> RemoteTask:
        """A task that an earlier launcher has started."""
        task = RemoteTask(self._connection, earlier.task, earlier.name, manual_ack=self._options.manual_ack)
        if earlier.gone is not None and earlier.gone <= self.hello.event_number:
            task.mark_ended(earlier.returncode, earlier.signal)
        return task

    @property
    def id(self) -> str:
        """The session's name on its node; with it another process can take it over."""
        return self.hello.session

    @property
    def disconnected_s(self) -> float:
        """Seconds without a connection; 0.0 while there is one."""
        return self._connection.disconnected_s

    @property
    def silent_s(self) -> float:
        """Seconds since anything arrived from the node."""
        return self._connection.silent_s

    def has_answered(self, within_s: float) -> bool:
        """Whether there is a connection over which something has arrived within the last seconds."""
        return self.lost is None and not self.disconnected_s and self.silent_s < within_s

    @property
    def is_waited_for(self) -> bool:
        """Whether an answer may still come: the node is not lost, and has not been silent for long."""
        return self.lost is None and not self._connection.is_unheard

    @property
    def watermark(self) -> int:
        """Every event up to this ``seq`` was handled (without ``manual_ack``: has arrived).

        The next launcher resumes after it. 0 for a session that can't be resumed.
        """
        return self._connection.watermark if isinstance(self._connection, ResumableConnection) else 0

    def acknowledge(self, seq: int) -> None:
        """The event with that ``seq`` was handled, for good; the node need not keep it."""
        if isinstance(self._connection, ResumableConnection):
            self._connection.acknowledge(seq)

    def tasks(self) -> list[RemoteTask]:
        """The tasks so far, those of earlier launchers included; not those of ``run_task``.

        Tasks that nobody will follow must be given to ``discard``: the watermark waits for their events.
        """
        with self._connection.changed:
            return list(self._tasks.values())

    @property
    def lost(self) -> SkyctlError | None:
        """Why the session is over, or None while it is not."""
        return self._connection.lost

    def start_task(
        self,
        module: str,
        payload: Message,
        *,
        name: str | None = None,
        env: dict[str, str] | None = None,
        needs_ack: bool = True,
    ) -> RemoteTask:
        """Starts ``module.main(payload, channel)`` in a process of its own there.

        Args:
            needs_ack: with ``manual_ack``, whether its events, and the watermark, wait for ``acknowledge``.
        """
        number = next(self._numbers)
        title = name or f"{module.rpartition('.')[2]}-{number}"
        task = RemoteTask(self._connection, number, title, manual_ack=self._options.manual_ack and needs_ack)
        with self._connection.changed:
            self._tasks[number] = task
        request = {"module": module, "payload": payload, "name": task.name, "env": env or {}}
        self._connection.send({"op": "task", "task": number, **request})
        return task

    def run_task(
        self,
        module: str,
        payload: Message,
        timeout_s: float,
        env: dict[str, str] | None = None,
        *,
        answer: type,
    ) -> Message:
        """Runs a task to its end and gives its result (without the key ``event``).

        Args:
            answer: the dataclass of the result (``agent.task_events``).

        Raises:
            ProtocolError: the result is none that the task gives.
            SkyctlError: what went wrong there, translated (UnfitError for a lack of the node's).
            NodeError: no result in time; the task is ended.
        """
        task = self.start_task(module, payload, env=env, needs_ack=False)
        deadline = time.monotonic() + timeout_s
        try:
            while (event := task.recv(max(0.0, deadline - time.monotonic()), for_answer=True)) is not None:
                message = event[0]
                if message.get("event") == "result":
                    fields = read_as_json(answer, message, self.node.name)
                    return {key: value for key, value in fields.items() if key != "event"}
                if message.get("event") in ("error", "exit"):
                    raise translate_task_failure(self.node, message)
        except BaseException:
            self._kill_quietly(task)
            raise
        finally:
            self.discard(task)
        self._kill_quietly(task)
        raise NodeError(
            f"node {self.node.name} gave no result of {module} within {timeout_s:g} s",
            node=self.node.name,
            hint="it may be overloaded; see what runs there",
        )

    @staticmethod
    def _kill_quietly(task: RemoteTask) -> None:
        with contextlib.suppress(SkyctlError):
            task.kill()

    def discard(self, task: RemoteTask) -> None:
        """Ignores what that task has said and may still say; the task itself goes on."""
        with self._connection.changed:
            self._tasks.pop(task.number, None)
            unread = task.discard_events()
            self._connection.changed.notify_all()
        for seq in unread:
            self.acknowledge(seq)

    def push(self, archive: bytes | Path, digest: str, *, keep: bool = True) -> str:
        """A file onto the node, unless it is there; gives its path there.

        Args:
            digest: its SHA-256.
            keep: in the node's cache; else in the session's folder, gone when the session ends.
        """
        return self._transfers.push(archive, digest, keep=keep)

    def push_tree(self, files: dict[str, bytes]) -> str:
        """A folder into the node's cache, unless it is there; gives its path there. Keys: relative paths."""
        return self._transfers.push_tree(files)

    def fetch(self, remote_path: str, local_path: Path, most_bytes: int) -> None:
        """Copies a file from the node; it appears under its name when it is whole and right.

        Args:
            most_bytes: how large it can be; of a larger one nothing is taken.

        Raises:
            ProtocolError: it is larger, or not as large as the node has announced.
            NodeError: the node can't read it.
            SkyctlError: it can't be written here.
        """
        self._transfers.fetch(remote_path, local_path, most_bytes)

    def close(self) -> None:
        """Ends every task, waits until the agent says that nothing is left, and disconnects.

        If there is no connection, it is dialled once more to do so; see ``shutdown_failure``.
        """
        with self._close_lock:
            if self._closed:
                return
            try:
                bye = self._connection.close(CLOSE_TIMEOUT_S + self._options.grace_s)
                self.surviving_pids = list(bye.left) if bye else []
                self._note_shutdown_failure()
            finally:
                self._closed = True
                self._connection.drop()
                not_ours = isinstance(self._connection.lost, SessionGoneError)
                for node_connection in self._release():
                    node_connection.detach() if not_ours else node_connection.close()

    def detach(self) -> None:
        """Leaves the agent running, for another process to take over (``adopt_session``)."""
        with self._close_lock:
            if not isinstance(self._connection, ResumableConnection):
                raise ValueError("a session without hold_s ends with its connection")
            if not self._closed:
                self._closed = True
                self._connection.detach()
                for node_connection in self._release():
                    node_connection.detach()

    def _note_shutdown_failure(self) -> None:
        ours = self.node.transport == "local" and not self._adopted  # a child: it is ended in any case
        if isinstance(self._connection, ResumableConnection) and not self._connection.has_ended and not ours:
            why = self._connection.lost.message if self._connection.lost else "it does not answer"
            hold_s = self.hello.hold_s or self._options.hold_s
            self.shutdown_failure = UnreachableError(
                f"node {self.node.name} could not be told to end session {self.id}: {why}",
                node=self.node.name,
                hint=f"it ends by itself {hold_s:g} s after it last heard from us",
            )

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the connection

    def _release(self) -> list[NodeConnection]:
        with self._node_connections_lock:
            self._closed = True
            return list(reversed(self._node_connections))

    def _dial(self, arrived: dict[str, int], left_s: float) -> DialledChannel:
        """Another connection to the same agent; the earlier one is given up."""
        options = replace(
            self._options,
            timeout_s=min(self._options.timeout_s, max(left_s, MIN_DIAL_TIMEOUT_S)),
            start_timeout_s=min(self._options.start_timeout_s, max(left_s, MIN_DIAL_TIMEOUT_S)),
        )
        node_connection = self._connector(self.node, options)
        try:
            channel, hello = attach_agent(node_connection, options, self.id, self._owner, arrived)
        except BaseException:
            node_connection.close()
            raise
        with self._node_connections_lock:
            closed = self._closed
            earlier = self._node_connections[-1]
            if not closed:
                self._node_connections = [self._node_connections[0], node_connection]
        if closed:
            node_connection.detach()
            raise SkyctlError(f"the session with node {self.node.name} is closed")
        earlier.detach()
        if earlier is not self._node_connections[0]:  # where that is local, the agent itself is its child
            earlier.close()
        self.hello = hello
        return DialledChannel(channel, hello)

    def _report_change(self, disconnected: bool) -> None:
        if self.on_connection_change is not None:
            with contextlib.suppress(Exception):  # a fault of the callback's must not end the connection
                self.on_connection_change(disconnected)

    def _receive(self, message: AgentMessage, body: bytes) -> bool:
        """Handles a message, holding the connection's condition; whether its receiver will acknowledge it."""
        if isinstance(message, TaskEvent | TaskGone):
            task = self._tasks.get(message.task)
            if task is None:
                return False
            if isinstance(message, TaskEvent):
                return task.add_event(message.message, body, message.number)
            task.mark_ended(message.returncode, message.signal)
        elif isinstance(message, FileMessage):
            self._transfers.add_reply(message, body)
        return False
