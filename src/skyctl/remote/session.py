"""One node, one connection, one agent, many tasks.

A session is opened with ``open_session`` (or many with ``open_sessions``) and must be closed: then nothing of
it is left on the node but the cache. If the launcher dies instead, the agent sees its input end and does the
same.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import queue
import random
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO

from skyctl.agent.store import pack
from skyctl.agent.wire import CHUNK_BYTES
from skyctl.errors import InputError, NodeError, SkyctlError, UnfitError
from skyctl.records.cluster import Node
from skyctl.remote.base import Channel, ConnectOptions, Remote
from skyctl.remote.bootstrap import start_agent
from skyctl.remote.connect import connect
from skyctl.remote.link import Link, Message
from skyctl.remote.nursery import connector_for
from skyctl.remote.tasks import Task
from skyctl.remote.translate import translate

__all__ = ["Session", "Task", "open_session", "open_sessions", "translate"]

CLOSE_S = 12.0
JITTER_S = 0.1


class Session:
    """A running agent on a node. Threads may share it.

    ``hello``: what the agent said of its node: hostname, python, version, platform, pid, addresses (pairs of
    interface and IPv4), home, cache, cwd, session, folder.
    ``left``: processes that the agent could not end, known after ``close``.
    """

    def __init__(self, remote: Remote, channel: Channel, hello: Message, options: ConnectOptions) -> None:
        self.node = remote.node
        self.host = remote.host
        self.hello = hello
        self.left: list[int] = []
        self._remote = remote
        self._numbers = itertools.count(1)
        self._tasks: dict[int, Task] = {}
        self._replies: dict[int, deque[tuple[Message, bytes]]] = {}
        self._grace_s = options.grace_s
        self._close_lock = threading.Lock()
        self._closed = False
        self._link = Link(remote.node, channel, self._receive, options.lease_s / 2)

    @property
    def lost(self) -> SkyctlError | None:
        """Why the session is over, or None while it is not."""
        return self._link.lost

    @property
    def silent_s(self) -> float:
        """Seconds since anything came from the node."""
        return self._link.silent_s

    @property
    def away_s(self) -> float:
        """Seconds since the connection was lost and is being redialled; 0.0 while there is one."""
        return 0.0

    def task(
        self, module: str, payload: Message, *, name: str | None = None, env: dict[str, str] | None = None
    ) -> Task:
        """Starts ``module.main(payload, channel)`` in a process of its own there."""
        number = next(self._numbers)
        task = Task(self._link, number, name or f"{module.rpartition('.')[2]}-{number}")
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
        task = self.task(module, payload, env=env)
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

    def push(self, archive: bytes | Path, digest: str, *, keep: bool = True) -> str:
        """A file onto the node, unless it is there; gives its path there.

        Args:
            digest: its SHA-256.
            keep: in the node's cache; else in the session's folder, gone when the session ends.
        """
        kind = "blobs" if keep else "private"
        size = archive.stat().st_size if isinstance(archive, Path) else len(archive)
        found = self._request({"op": "have", "kind": kind, "digest": digest, "bytes": size})["path"]
        return str(found) if found else self._put(kind, digest, archive)

    def push_tree(self, files: dict[str, bytes]) -> str:
        """A folder into the node's cache, unless it is there; gives its path there. Keys: relative paths."""
        digest, archive = pack(files)
        found = self._request({"op": "have", "kind": "trees", "digest": digest})["path"]
        return str(found) if found else self._put("trees", digest, archive)

    def fetch(self, remote_path: str, local_path: Path) -> None:
        """Copies a file from the node; it appears under its name when it is whole and right.

        Raises:
            NodeError: the node can't read it.
            SkyctlError: it can't be written here.
        """
        request = self._expect()
        name = ""
        try:
            fd, name = tempfile.mkstemp(prefix=f".{local_path.name[:50]}-", dir=local_path.parent)
            with os.fdopen(fd, "wb") as file:
                self._link.send({"op": "fetch", "id": request, "path": remote_path})
                self._receive_file(request, file, remote_path)
            Path(name).chmod(0o644)
            Path(name).replace(local_path)
        except OSError as exc:
            raise SkyctlError(f"can't write {local_path}: {exc.strerror or exc}") from exc
        finally:
            if name:
                Path(name).unlink(missing_ok=True)
            self._cancel(request)

    def close(self) -> None:
        """Ends every task, waits until the agent says that nothing is left, and disconnects."""
        with self._close_lock:
            if self._closed:
                return
            try:
                bye = self._link.close(CLOSE_S + self._grace_s)
                self.left = list((bye or {}).get("left", []))
            finally:
                self._closed = True
                self._link.drop()
                self._remote.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- requests and their replies

    def _expect(self) -> int:
        number = next(self._numbers)
        with self._link.changed:
            self._replies[number] = deque()
        return number

    def _next_reply(self, request: int) -> tuple[Message, bytes]:
        with self._link.changed:
            queue = self._replies[request]
            self._link.wait(lambda: True if queue else None, None)
            message, body = queue.popleft()
        if message.get("error"):
            where = f" ({message['path']})" if message.get("path") else ""
            raise UnfitError(
                f"node {self.node.name}: {message['error']}{where}",
                node=self.node.name,
                hint="see whether its disk is full, and whether the path is right and may be used",
            )
        return message, body

    def _request(self, message: Message) -> Message:
        request = self._expect()
        try:
            self._link.send({**message, "id": request})
            return self._next_reply(request)[0]
        finally:
            self._replies.pop(request, None)

    def _cancel(self, request: int) -> None:
        with self._link.changed:
            self._replies.pop(request, None)
            if self._link.lost is not None:
                return
        self._link.send({"op": "cancel", "id": request})

    def _put(self, kind: str, digest: str, content: bytes | Path) -> str:
        request = self._expect()
        head = {"op": "put", "id": request, "kind": kind, "digest": digest}
        try:
            for index, chunk, last in _chunks(content):
                if self._replies[request]:  # refused already
                    break
                self._link.send({**head, "first": index == 0, "last": last}, chunk)
            return str(self._next_reply(request)[0]["path"])
        except OSError as exc:
            raise InputError(f"can't read {content if isinstance(content, Path) else kind}: {exc}") from exc
        finally:
            self._cancel(request)

    def _receive_file(self, request: int, file: BinaryIO, remote_path: str) -> None:
        digest = hashlib.sha256()
        while True:
            message, body = self._next_reply(request)
            if message["op"] == "chunk":
                file.write(body)
                digest.update(body)
                self._link.send({"op": "more", "id": request})
            elif message["op"] == "reply":
                break
        if digest.hexdigest() != message["sha256"]:
            raise NodeError(
                f"{remote_path} of node {self.node.name} was damaged on the way", node=self.node.name
            )

    def _receive(self, message: Message, body: bytes) -> None:
        """A frame has come; the link's condition is held."""
        op = message.get("op")
        if op in ("event", "gone"):
            task = self._tasks.get(message["task"])
            if task is None:
                return
            if op == "event":
                task.take(message["message"], body)
            else:
                task.end(message)
                del self._tasks[message["task"]]
        elif (queue := self._replies.get(message.get("id", 0))) is not None:
            queue.append((message, body))


def _chunks(content: bytes | Path) -> Iterable[tuple[int, bytes | memoryview, bool]]:
    """(index, piece, whether it is the last); at least one piece."""
    if isinstance(content, bytes):
        view = memoryview(content)
        count = max(1, -(-len(view) // CHUNK_BYTES))
        for index in range(count):
            yield index, view[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES], index == count - 1
        return
    with content.open("rb") as file:
        piece = file.read(CHUNK_BYTES)
        for index in itertools.count():
            following = file.read(CHUNK_BYTES)
            yield index, piece, not following
            if not following:
                return
            piece = following


def open_session(
    node: Node, options: ConnectOptions, connector: Callable[[Node, ConnectOptions], Remote] = connect
) -> Session:
    """Connects to the node and starts an agent there. Errors name the node; nothing is left after one."""
    remote = connector(node, options)
    try:
        channel, hello = start_agent(remote, options)
        return Session(remote, channel, hello, options)
    except BaseException:
        remote.close()
        raise


def open_sessions(
    nodes: Iterable[Node],
    options: ConnectOptions,
    on_progress: Callable[[str, Session | SkyctlError], None] | None = None,
    limit: int = 8,
    connector: Callable[[Node, ConnectOptions], Remote] | None = None,
) -> dict[str, Session | SkyctlError]:
    """Opens a session with every node, ``limit`` at a time (sshd's MaxStartups begins to refuse at 10).

    Returns:
        an outcome per node, in the nodes' order; an error of one is no other's.

    Local nodes that are alike share a nursery (``remote/nursery.py``), unless a connector is given.
    On an interrupt those opened by then, and those opened after, are closed.
    """
    nodes = list(nodes)
    with contextlib.nullcontext(connector) if connector else connector_for(nodes) as dialled:
        return _open_all(nodes, options, on_progress, limit, dialled)


def _open_all(
    nodes: list[Node],
    options: ConnectOptions,
    on_progress: Callable[[str, Session | SkyctlError], None] | None,
    limit: int,
    connector: Callable[[Node, ConnectOptions], Remote],
) -> dict[str, Session | SkyctlError]:
    given_up = threading.Event()
    waiting: queue.SimpleQueue[tuple[int, Node]] = queue.SimpleQueue()
    for index, node in enumerate(nodes):
        waiting.put((index, node))
    results: queue.SimpleQueue[tuple[Node, Session | BaseException]] = queue.SimpleQueue()

    def dial() -> None:
        while not given_up.is_set():
            try:
                index, node = waiting.get_nowait()
            except queue.Empty:
                return
            given_up.wait(random.uniform(0, JITTER_S) if index else 0)  # noqa: S311 - spreads dials, no secret
            try:
                session = open_session(node, options, connector)
            except BaseException as exc:  # noqa: BLE001 - handed to the caller's thread
                results.put((node, exc))
                continue
            if given_up.is_set():
                session.close()
            results.put((node, session))

    threads = [threading.Thread(target=dial, name="dial", daemon=True) for _ in range(min(limit, len(nodes)))]
    outcomes: dict[str, Session | SkyctlError] = {}
    try:
        for thread in threads:
            thread.start()
        for _ in nodes:
            node, outcome = results.get()
            if not isinstance(outcome, Session | SkyctlError):
                raise outcome
            outcomes[node.name] = outcome
            if on_progress:
                on_progress(node.name, outcome)
    except BaseException:
        given_up.set()
        opened: list[Session | BaseException] = list(outcomes.values())
        while not results.empty():
            opened.append(results.get()[1])
        _close_all(opened)
        raise
    return {node.name: outcomes[node.name] for node in nodes}


def _close_all(outcomes: Iterable[Session | BaseException]) -> None:
    """Closes those that are sessions, all at once."""
    threads = [
        threading.Thread(target=outcome.close, daemon=True)
        for outcome in outcomes
        if isinstance(outcome, Session)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(CLOSE_S + 5)
