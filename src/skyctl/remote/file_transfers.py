"""Files to and from a node over its session's connection: the launcher's side of ``agent/file_server.py``."""

from __future__ import annotations

import hashlib
import itertools
import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO

from skyctl.agent.frames import CHUNK_BYTES, Message
from skyctl.agent.node_cache import pack_archive, tree_digest
from skyctl.errors import InputError, NodeError, ProtocolError, SkyctlError, UnfitError
from skyctl.remote.agent_connection import AgentConnection
from skyctl.remote.agent_messages import FileChunk, FileMessage, FileReply


class FileTransfers:
    """Requests to one agent, and their replies.

    Args:
        next_number: gives the number of the next request.
    """

    def __init__(self, connection: AgentConnection, next_number: Callable[[], int]) -> None:
        self.node = connection.node
        self._connection = connection
        self._next_number = next_number
        self._replies: dict[int, deque[tuple[FileMessage, bytes]]] = {}

    def add_reply(self, message: FileMessage, body: bytes) -> None:
        """A reply has arrived; the connection's condition is held."""
        if (queue := self._replies.get(message.id)) is not None:
            queue.append((message, body))

    def push(self, archive: bytes | Path, digest: str, *, keep: bool = True) -> str:
        """A file onto the node, unless it is there; gives its path there.

        Args:
            digest: its SHA-256.
            keep: in the node's cache; else in the session's folder, gone when the session ends.
        """
        kind = "blobs" if keep else "private"
        size = archive.stat().st_size if isinstance(archive, Path) else len(archive)
        path = self._request({"op": "have", "kind": kind, "digest": digest, "bytes": size}).path
        return path or self._put(kind, digest, archive)

    def push_tree(self, files: dict[str, bytes]) -> str:
        """A folder into the node's cache, unless it is there; gives its path there. Keys: relative paths."""
        digest = tree_digest(files)
        path = self._request({"op": "have", "kind": "trees", "digest": digest}).path
        return path or self._put("trees", *pack_archive(files))

    def fetch(self, remote_path: str, local_path: Path, most_bytes: int) -> None:
        """Copies a file from the node; it appears under its name when it is whole and right.

        Args:
            most_bytes: how large it can be; of a larger one nothing is taken.

        Raises:
            ProtocolError: it is larger, or not as large as the node has announced.
            NodeError: the node can't read it.
            SkyctlError: it can't be written here.
        """
        request = self._expect()
        name = ""
        try:
            fd, name = tempfile.mkstemp(prefix=f".{local_path.name[:50]}-", dir=local_path.parent)
            with os.fdopen(fd, "wb") as file:
                self._connection.send({"op": "fetch", "id": request, "path": remote_path})
                self._receive_file(request, file, remote_path, most_bytes)
            Path(name).chmod(0o644)
            Path(name).replace(local_path)
        except OSError as exc:
            raise SkyctlError(f"can't write {local_path}: {exc.strerror or exc}") from exc
        finally:
            if name:
                Path(name).unlink(missing_ok=True)
            self._cancel(request)

    # --- requests and their replies

    def _expect(self) -> int:
        number = self._next_number()
        with self._connection.changed:
            self._replies[number] = deque()
        return number

    def _next_reply(self, request: int) -> tuple[FileMessage, bytes]:
        with self._connection.changed:
            queue = self._replies[request]
            self._connection.wait(lambda: True if queue else None, None, for_answer=True)
            message, body = queue.popleft()
        if isinstance(message, FileReply) and message.error:
            where = f" ({message.path})" if message.path else ""
            raise UnfitError(
                f"node {self.node.name}: {message.error}{where}",
                node=self.node.name,
                hint="see whether its disk is full, and whether the path is right and may be used",
            )
        return message, body

    def _next_final_reply(self, request: int) -> FileReply:
        while not isinstance(message := self._next_reply(request)[0], FileReply):
            pass
        return message

    def _request(self, message: Message) -> FileReply:
        request = self._expect()
        try:
            self._connection.send({**message, "id": request})
            return self._next_final_reply(request)
        finally:
            self._replies.pop(request, None)

    def _cancel(self, request: int) -> None:
        with self._connection.changed:
            self._replies.pop(request, None)
            if self._connection.lost is not None:
                return
        self._connection.send({"op": "cancel", "id": request})

    def _put(self, kind: str, digest: str, content: bytes | Path) -> str:
        request = self._expect()
        head = {"op": "put", "id": request, "kind": kind, "digest": digest}
        try:
            for index, chunk, last in _split_chunks(content):
                if self._replies[request]:  # refused already
                    break
                self._connection.send({**head, "first": index == 0, "last": last}, chunk)
            return str(self._next_final_reply(request).path)
        except OSError as exc:
            raise InputError(f"can't read {content if isinstance(content, Path) else kind}: {exc}") from exc
        finally:
            self._cancel(request)

    def _receive_file(self, request: int, file: BinaryIO, remote_path: str, most_bytes: int) -> None:
        digest = hashlib.sha256()
        size = left = -1
        while True:
            message, body = self._next_reply(request)
            if isinstance(message, FileChunk):
                left -= len(body)
                if left < 0:
                    raise self._refused(remote_path, f"sent more than the {max(size, 0)} bytes it announced")
                file.write(body)
                digest.update(body)
                self._connection.send({"op": "more", "id": request})
            elif isinstance(message, FileReply):
                break
            elif size >= 0:
                raise self._refused(remote_path, "said twice how large it is")
            else:
                size = left = message.bytes
                if not 0 <= size <= most_bytes:
                    raise self._refused(remote_path, f"is {size} bytes large; {most_bytes} are the most")
        if left > 0:
            raise self._refused(remote_path, f"ended {left} bytes before the {size} that it announced")
        if digest.hexdigest() != message.sha256:
            raise NodeError(
                f"{remote_path} of node {self.node.name} was damaged on the way", node=self.node.name
            )

    def _refused(self, remote_path: str, what: str) -> ProtocolError:
        return ProtocolError(f"{remote_path} of node {self.node.name} {what}", node=self.node.name)


def _split_chunks(content: bytes | Path) -> Iterable[tuple[int, bytes | memoryview, bool]]:
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
