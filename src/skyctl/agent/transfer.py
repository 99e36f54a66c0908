"""Files to and from the node: what the launcher puts into the cache or the session, and what it fetches.

Both go in chunks. A fetch has at most ``WINDOW`` chunks under way; the launcher asks for more as it writes
them, so a slow link or disk never makes either side's memory grow, and other traffic gets its turn.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import tempfile
from pathlib import Path
from typing import Any, BinaryIO

from skyctl.agent.backlog import Backlog
from skyctl.agent.store import Store
from skyctl.agent.stream import Outbox
from skyctl.agent.wire import CHUNK_BYTES

WINDOW = 8
Message = dict[str, Any]
DIGEST = re.compile(r"[0-9a-f]{64}")


class Put:
    """A file or an archive that is coming in; kept beside its place until it is whole."""

    def __init__(self, store: Store, session: Path, kind: str, digest: str) -> None:
        if kind not in ("blobs", "trees", "private") or not DIGEST.fullmatch(digest):
            raise ValueError(f"no such place in the cache: {kind}/{digest}")
        self._store, self._kind, self._digest = store, kind, digest
        self._place = session if kind == "private" else store.root / kind
        self._hash = hashlib.sha256()
        fd, name = tempfile.mkstemp(prefix=".new-", dir=self._place)
        self._path = Path(name)
        self._file: BinaryIO = os.fdopen(fd, "wb")

    def add(self, chunk: bytes) -> None:
        """The next bytes."""
        self._file.write(chunk)
        self._hash.update(chunk)

    def finish(self) -> Path:
        """Verifies and moves it to its place. Raises ValueError where the bytes are not what was named."""
        self._file.close()
        if self._kind == "trees":
            return self._store.add_tree("trees", self._digest, self._path.read_bytes())
        if self._hash.hexdigest() != self._digest:
            raise ValueError(f"file {self._digest[:12]} was damaged on the way")
        target = self._place / self._digest
        self._path.replace(target)
        return target

    def close(self) -> None:
        """Removes what is half there."""
        with contextlib.suppress(OSError):
            self._file.close()
        self._path.unlink(missing_ok=True)


class Fetch:
    """A file that is going out, chunk by chunk."""

    def __init__(self, request: int, path: str) -> None:
        self.request = request
        self.credit = WINDOW
        self._hash = hashlib.sha256()
        if not Path(path).is_file():
            raise FileNotFoundError(errno.ENOENT, "there is no such file", path)
        self._file = Path(path).open("rb")  # noqa: SIM115 - closed by close
        self.size_bytes = os.fstat(self._file.fileno()).st_size
        self._sent_bytes = 0

    def next(self) -> tuple[dict[str, Any], bytes] | None:
        """The next chunk's frame; None when it was the last, or the launcher must ask for more first."""
        if not self.credit:
            return None
        self.credit -= 1
        data = self._file.read(CHUNK_BYTES)
        self._hash.update(data)
        self._sent_bytes += len(data)
        if data:
            return {"op": "chunk", "id": self.request}, data
        done = {
            "op": "reply",
            "id": self.request,
            "bytes": self._sent_bytes,
            "sha256": self._hash.hexdigest(),
        }
        return done, b""

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class Files:
    """All transfers of one agent."""

    def __init__(self, store: Store, session: Path, out: Outbox | Backlog) -> None:
        self._store, self._session, self._out = store, session, out
        self._puts: dict[int, Put] = {}
        self._fetches: dict[int, Fetch] = {}

    def request(self, op: object, message: Message, body: bytes) -> None:
        """``have``, ``put`` or ``fetch``; what goes wrong is the reply."""
        request = message["id"]
        try:
            if op == "have":
                self._out.push({"op": "reply", "id": request, "path": self._have(message)})
            elif op == "put":
                self._put(request, message, body)
            elif op == "fetch":
                self._fetches[request] = fetch = Fetch(request, message["path"])
                self._out.push({"op": "size", "id": request, "bytes": fetch.size_bytes})
            else:
                raise ValueError(f"this agent knows no {op!r}")
        except (OSError, ValueError) as exc:
            self._refuse(request, exc)

    def _have(self, message: Message) -> str | None:
        if message["kind"] == "private":
            path = self._session / str(message["digest"])
            found = path if path.is_file() else None
        elif message["kind"] == "trees":
            found = self._store.tree("trees", message["digest"])
        else:
            found = self._store.blob(message["digest"], message["bytes"])
        return str(found) if found else None

    def _put(self, request: int, message: Message, body: bytes) -> None:
        if message.get("first"):
            self._puts[request] = Put(self._store, self._session, message["kind"], message["digest"])
        put = self._puts.get(request)
        if put is None:
            return  # refused already; what follows was under way
        put.add(body)
        if message.get("last"):
            self._out.push({"op": "reply", "id": request, "path": str(put.finish())})
            self.forget(request)

    def _refuse(self, request: int, exc: Exception) -> None:
        self.forget(request)
        reason = getattr(exc, "strerror", None) or str(exc)
        self._out.push(
            {
                "op": "reply",
                "id": request,
                "error": reason,
                "errno": getattr(exc, "errno", None),
                "path": str(getattr(exc, "filename", None) or ""),
            }
        )

    def more(self, request: int) -> None:
        """The launcher has written a chunk of that fetch."""
        if fetch := self._fetches.get(request):
            fetch.credit += 1

    def ready(self) -> bool:
        """Whether ``pump`` would send something at once."""
        return self._out.size_bytes < CHUNK_BYTES and any(fetch.credit for fetch in self._fetches.values())

    def forget(self, request: int) -> None:
        """Ends a transfer, whole or not."""
        transfer = self._puts.pop(request, None) or self._fetches.pop(request, None)
        if transfer is not None:
            transfer.close()

    def forget_all(self) -> None:
        """Ends every transfer."""
        for request in [*self._puts, *self._fetches]:
            self.forget(request)

    def pump(self) -> None:
        """Sends chunks, as long as little else waits to go out."""
        for fetch in list(self._fetches.values()):
            while self._out.size_bytes < CHUNK_BYTES and fetch.credit:
                try:
                    frame = fetch.next()
                except OSError as exc:
                    self._refuse(fetch.request, exc)
                    break
                if frame is None:
                    break
                self._out.push(*frame)
                if frame[0]["op"] == "reply":
                    self.forget(fetch.request)
                    break
