"""A session: one node, one agent, many tasks. ``session.py`` opens them."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from skyctl.errors import NodeError, SessionGoneError, SkyctlError, UnreachableError
from skyctl.records.cluster import Node
from skyctl.remote.base import Channel, ConnectOptions, Remote
from skyctl.remote.bootstrap import attach_agent
from skyctl.remote.heldlink import Dialled, HeldLink
from skyctl.remote.link import Link, Message
from skyctl.remote.tasks import Task
from skyctl.remote.transfers import Transfers
from skyctl.remote.translate import translate

CLOSE_S = 12.0
DIAL_S = 5.0
Connector = Callable[[Node, ConnectOptions], Remote]


class Session:
    """A running agent on a node. Threads may share it.

    ``hello``: what the agent said of its node: hostname, python, version, platform, pid, addresses (pairs of
    interface and IPv4), home, cache, cwd, session, folder.
    ``left``: processes that the agent could not end, known after ``close``.
    ``unended``: why the agent could not be told to end, known after ``close``: it will by itself.
    ``on_away``: called with True when the connection is lost and dialled again, with False when it is back.
    """

    def __init__(
        self,
        remote: Remote,
        channel: Channel,
        hello: Message,
        options: ConnectOptions,
        *,
        connector: Connector,
        owner: str,
        adopted: bool = False,
    ) -> None:
        self.node = remote.node
        self.host = remote.host
        self.hello = hello
        self.left: list[int] = []
        self.unended: SkyctlError | None = None
        self.on_away: Callable[[bool], None] | None = None
        self._remotes = [remote]
        self._remotes_lock = threading.Lock()
        self._connector, self._options = connector, options
        self._owner, self._adopted = owner, adopted
        self._numbers = itertools.count(hello.get("highest", 0) + 1)
        self._close_lock = threading.Lock()
        self._closed = False
        self._link = self._make_link(channel)
        self._transfers = Transfers(self._link, lambda: next(self._numbers))
        self._tasks = {said["task"]: self._known(said) for said in hello.get("tasks", [])}
        self._link.start()

    def _make_link(self, channel: Channel) -> Link:
        options, silence_s = self._options, float(self.hello.get("lease_s", self._options.lease_s)) / 2
        if not (options.hold_s or self._adopted):
            return Link(self.node, channel, self._receive, silence_s)
        return HeldLink(
            self.node,
            channel,
            self._receive,
            silence_s,
            hello=self.hello,
            dial=self._dial,
            redial_s=options.redial_s,
            manual=options.manual_ack,
            told=self._tell,
        )

    def _known(self, said: Message) -> Task:
        """A task that was there before us."""
        task = Task(self._link, said["task"], said["name"], manual=self._options.manual_ack)
        if "gone" in said and said["gone"] <= self.hello["n"]:
            task.end(said)
        return task

    @property
    def id(self) -> str:
        """The session's name on its node; with it another process can take it over."""
        return str(self.hello["session"])

    @property
    def away_s(self) -> float:
        """How long it has been without a connection; 0.0 while it has one."""
        return self._link.away_s

    @property
    def silent_s(self) -> float:
        """Seconds since anything came from the node."""
        return self._link.silent_s

    @property
    def watermark(self) -> int:
        """Every event up to this ``seq`` was handled (without ``manual_ack``: has come).

        Where another process goes on. 0 for a session that is not held.
        """
        return self._link.watermark if isinstance(self._link, HeldLink) else 0

    def handled(self, seq: int) -> None:
        """The event with that ``seq`` is safely written; the node need not keep it."""
        if isinstance(self._link, HeldLink):
            self._link.handled(seq)

    def tasks(self) -> list[Task]:
        """The tasks there have been, also those that an earlier launcher started; not those of ``call``.

        Those that nobody will follow must be given to ``discard``: the watermark waits for their events.
        """
        with self._link.changed:
            return list(self._tasks.values())

    @property
    def lost(self) -> SkyctlError | None:
        """Why the session is over, or None while it is not."""
        return self._link.lost

    def task(
        self,
        module: str,
        payload: Message,
        *,
        name: str | None = None,
        env: dict[str, str] | None = None,
        reported: bool = True,
    ) -> Task:
        """Starts ``module.main(payload, channel)`` in a process of its own there.

        Args:
            reported: with ``manual_ack``, whether its events wait for ``handled``, and the watermark too.
        """
        number = next(self._numbers)
        title = name or f"{module.rpartition('.')[2]}-{number}"
        task = Task(self._link, number, title, manual=self._options.manual_ack and reported)
        with self._link.changed:
            self._tasks[number] = task
        order = {"module": module, "payload": payload, "name": task.name, "env": env or {}}
        self._link.send({"op": "task", "task": number, **order})
        return task

    def call(
        self, module: str, payload: Message, timeout_s: float, env: dict[str, str] | None = None
    ) -> Message:
        """Runs a task to its end and gives its result (without the key ``event``).

        Raises:
            SkyctlError: what went wrong there, translated (UnfitError for a lack of the node's).
            NodeError: no result in time; the task is ended.
        """
        task = self.task(module, payload, env=env, reported=False)
        deadline = time.monotonic() + timeout_s
        try:
            while (event := task.recv(max(0.0, deadline - time.monotonic()))) is not None:
                message = event[0]
                if message.get("event") == "result":
                    return {key: value for key, value in message.items() if key != "event"}
                if message.get("event") in ("error", "exit"):
                    raise translate(self.node, message)
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
    def _kill_quietly(task: Task) -> None:
        with contextlib.suppress(SkyctlError):
            task.kill()

    def discard(self, task: Task) -> None:
        """Nobody will ask for what that task has said or may still say; it is not ended."""
        with self._link.changed:
            self._tasks.pop(task.number, None)
            left = task.drop()
            self._link.changed.notify_all()
        for seq in left:
            self.handled(seq)

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

    def fetch(self, remote_path: str, local_path: Path) -> None:
        """Copies a file from the node; it appears under its name when it is whole and right.

        Raises:
            NodeError: the node can't read it.
            SkyctlError: it can't be written here.
        """
        self._transfers.fetch(remote_path, local_path)

    def close(self) -> None:
        """Ends every task, waits until the agent says that nothing is left, and disconnects.

        Where the connection is away it is dialled once more to do so; see ``unended``.
        """
        with self._close_lock:
            if self._closed:
                return
            try:
                bye = self._link.close(CLOSE_S + self._options.grace_s)
                self.left = list((bye or {}).get("left", []))
                self._note_unended()
            finally:
                self._closed = True
                self._link.drop()
                others = isinstance(self._link.lost, SessionGoneError)  # or it is gone: not ours to end
                for remote in self._release():
                    remote.hang_up() if others else remote.close()

    def let_go(self) -> None:
        """Leaves the agent holding, for another process to take over (``adopt_session``)."""
        with self._close_lock:
            if not isinstance(self._link, HeldLink):
                raise ValueError("a session without hold_s ends with its connection")
            if not self._closed:
                self._closed = True
                self._link.let_go()
                for remote in self._release():
                    remote.hang_up()

    def _note_unended(self) -> None:
        ours = self.node.transport == "local" and not self._adopted  # a child: it is ended in any case
        if isinstance(self._link, HeldLink) and not self._link.ended and not ours:
            why = self._link.lost.message if self._link.lost else "it does not answer"
            hold_s = self.hello.get("hold_s", self._options.hold_s)
            self.unended = UnreachableError(
                f"node {self.node.name} could not be told to end session {self.id}: {why}",
                node=self.node.name,
                hint=f"it ends by itself {hold_s:g} s after it last heard from us",
            )

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the connection

    @property
    def _remote(self) -> Remote:
        return self._remotes[-1]

    def _release(self) -> list[Remote]:
        with self._remotes_lock:
            self._closed = True
            return list(reversed(self._remotes))

    def _dial(self, words: Message, left_s: float) -> Dialled:
        """Another connection to the same agent; the earlier one is done with."""
        options = replace(
            self._options,
            timeout_s=min(self._options.timeout_s, max(left_s, DIAL_S)),
            start_timeout_s=min(self._options.start_timeout_s, max(left_s, DIAL_S)),
        )
        remote = self._connector(self.node, options)
        try:
            channel, hello = attach_agent(remote, options, self.id, {**words, "owner": self._owner})
        except BaseException:
            remote.close()
            raise
        with self._remotes_lock:
            closed = self._closed
            earlier = self._remotes[-1]
            if not closed:
                self._remotes = [self._remotes[0], remote]
        if closed:
            remote.hang_up()
            raise SkyctlError(f"the session with node {self.node.name} is closed")
        earlier.hang_up()
        if earlier is not self._remotes[0]:  # where that is local, the agent itself is its child
            earlier.close()
        self.hello = hello
        return Dialled(channel, hello)

    def _tell(self, away: bool) -> None:
        if self.on_away is not None:
            with contextlib.suppress(Exception):  # whatever is wrong with it, the connection matters more
                self.on_away(away)

    def _receive(self, message: Message, body: bytes) -> bool:
        """A frame has come; the link's condition is held. Says whether who takes it will report it."""
        op = message.get("op")
        if op in ("event", "gone"):
            task = self._tasks.get(message["task"])
            if task is None:
                return False
            if op == "event":
                return task.take(message["message"], body, message.get("n", 0))
            task.end(message)
        else:
            self._transfers.take(message, body)
        return False
