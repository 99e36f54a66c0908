"""Files to and from the node: uploads into the cache or the session's folder, downloads of any file.

Both go in chunks. A download has at most ``DOWNLOAD_WINDOW_CHUNKS`` in flight; the launcher asks for more as
it writes them, so a slow link or disk never makes either side's memory grow, and other traffic gets its turn.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import tempfile
from pathlib import Path
from typing import Any, BinaryIO

from skyctl.agent.frames import CHUNK_BYTES, FrameWriteBuffer, Message
from skyctl.agent.node_cache import NodeCache
from skyctl.agent.retransmission_queue import RetransmissionQueue

DOWNLOAD_WINDOW_CHUNKS = 8
SHA256_HEX = re.compile(r"[0-9a-f]{64}")


class Upload:
    """A file or an archive that is arriving, under a temporary name until it is whole."""

    def __init__(self, store: NodeCache, session: Path, kind: str, digest: str) -> None:
        if kind not in ("blobs", "trees", "private") or not SHA256_HEX.fullmatch(digest):
            raise ValueError(f"no such place in the cache: {kind}/{digest}")
        self._store, self._kind, self._digest = store, kind, digest
        self._place = session if kind == "private" else store.root / kind
        self._hash = hashlib.sha256()
        fd, name = tempfile.mkstemp(prefix=".new-", dir=self._place)
        self._path = Path(name)
        self._file: BinaryIO = os.fdopen(fd, "wb")
        fcntl.flock(fd, fcntl.LOCK_SH)  # in use, however old a wrong clock makes it (``cache_cleanup``)

    def write(self, chunk: bytes) -> None:
        """Appends the next bytes of the file."""
        self._file.write(chunk)
        self._hash.update(chunk)

    def finish(self) -> Path:
        """Moves it to its place. Raises ValueError where its digest is not the one announced."""
        self._file.close()
        if self._kind == "trees":
            return self._store.add_tree("trees", self._digest, self._path.read_bytes())
        if self._hash.hexdigest() != self._digest:
            raise ValueError(f"file {self._digest[:12]} was damaged on the way")
        target = self._place / self._digest
        size_bytes = self._path.stat().st_size
        if self._kind == "private" or self._store.blob(self._digest, size_bytes) is None:
            self._path.replace(target)
        if self._kind == "blobs" and self._store.blob(self._digest, size_bytes) is None:
            raise OSError(errno.EIO, "what was written is not what was sent", str(target))
        return target

    def close(self) -> None:
        """Removes what was written, if it is not in its place."""
        with contextlib.suppress(OSError):
            self._file.close()
        self._path.unlink(missing_ok=True)


class Download:
    """A file that is sent to the launcher, chunk by chunk."""

    def __init__(self, request: int, path: str) -> None:
        self.request = request
        self.allowed_chunks = DOWNLOAD_WINDOW_CHUNKS
        self._hash = hashlib.sha256()
        if not Path(path).is_file():
            raise FileNotFoundError(errno.ENOENT, "there is no such file", path)
        self._file = Path(path).open("rb")  # noqa: SIM115 - closed by close
        self.file_bytes = os.fstat(self._file.fileno()).st_size
        self._sent_bytes = 0

    def next_frame(self) -> tuple[dict[str, Any], bytes] | None:
        """The next chunk's frame; None where it was the last, or the launcher must ask for more first."""
        if not self.allowed_chunks:
            return None
        self.allowed_chunks -= 1
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
        """Closes the file that is read."""
        self._file.close()


class FileServer:
    """All file transfers of one agent."""

    def __init__(self, store: NodeCache, session: Path, out: FrameWriteBuffer | RetransmissionQueue) -> None:
        self._store, self._session, self._out = store, session, out
        self._uploads: dict[int, Upload] = {}
        self._downloads: dict[int, Download] = {}

    def handle_request(self, op: object, message: Message, body: bytes) -> None:
        """Handles ``have``, ``put`` or ``fetch``; an error becomes the reply."""
        request = message["id"]
        try:
            if op == "have":
                self._out.push({"op": "reply", "id": request, "path": self._find_existing(message)})
            elif op == "put":
                self._receive_upload_chunk(request, message, body)
            elif op == "fetch":
                self._downloads[request] = download = Download(request, message["path"])
                self._out.push({"op": "size", "id": request, "bytes": download.file_bytes})
            else:
                raise ValueError(f"this agent knows no {op!r}")
        except (OSError, ValueError) as exc:
            self._refuse(request, exc)

    def _find_existing(self, message: Message) -> str | None:
        if message["kind"] == "private":
            path = self._session / str(message["digest"])
            existing = path if path.is_file() else None
        elif message["kind"] == "trees":
            existing = self._store.tree("trees", message["digest"])
        else:
            existing = self._store.blob(message["digest"], message["bytes"])
        return str(existing) if existing else None

    def _receive_upload_chunk(self, request: int, message: Message, body: bytes) -> None:
        if message.get("first"):
            self._uploads[request] = Upload(self._store, self._session, message["kind"], message["digest"])
        upload = self._uploads.get(request)
        if upload is None:
            return  # refused already; what follows was under way
        upload.write(body)
        if message.get("last"):
            self._out.push({"op": "reply", "id": request, "path": str(upload.finish())})
            self.cancel(request)

    def _refuse(self, request: int, exc: Exception) -> None:
        self.cancel(request)
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

    def grant_chunk(self, request: int) -> None:
        """The launcher has written a chunk of that download, so one more may be sent."""
        if download := self._downloads.get(request):
            download.allowed_chunks += 1

    def has_work(self) -> bool:
        """Whether ``send_chunks`` would send something at once."""
        return self._out.unsent_bytes < CHUNK_BYTES and any(
            download.allowed_chunks for download in self._downloads.values()
        )

    def cancel(self, request: int) -> None:
        """Ends a transfer, finished or not."""
        transfer = self._uploads.pop(request, None) or self._downloads.pop(request, None)
        if transfer is not None:
            transfer.close()

    def cancel_all(self) -> None:
        """Ends every transfer, finished or not."""
        for request in [*self._uploads, *self._downloads]:
            self.cancel(request)

    def send_chunks(self) -> None:
        """Sends chunks, as long as little else is unsent."""
        for download in list(self._downloads.values()):
            while self._out.unsent_bytes < CHUNK_BYTES and download.allowed_chunks:
                try:
                    frame = download.next_frame()
                except OSError as exc:
                    self._refuse(download.request, exc)
                    break
                if frame is None:
                    break
                self._out.push(*frame)
                if frame[0]["op"] == "reply":
                    self.cancel(download.request)
                    break
