"""What a keeper gives to other nodes' keepers, over connections that have proved the run's secret.

Frames as the agents speak (``agent.wire``), one question after the other::

    → {"op": "list", "newest": K, "steps": [STEP]}      the newest K and those; K 0: all
    ← {"steps": {STEP: {LAYER: {"sha256", "bytes", "attempt", "own"}}}}
    → {"op": "get", "step": STEP, "layer": LAYER}
    ← {"bytes": N}, then frames whose bodies are the file's N bytes; or {"missing": "…"}

Numbers name a file, never a path. Whoever asks checks what comes by the SHA-256 that a manifest gave.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from skyctl.agent.wire import CHUNK_BYTES, WireError, read_frame, write_frame
from skyctl.checkpoint import layout
from skyctl.errors import SkyctlError
from skyctl.transport.gate import Gate, listening, tell_stderr, words
from skyctl.transport.identity import Identity

MOST_PEERS = 64
"""Connections at a time, all of them proved."""
IDLE_S = 120.0
"""A peer that says or takes nothing for so long is let go; it connects again when it wants something."""
PROOF_S = 10.0
_ADMIT_S = 3600.0


def purpose(run_id: str) -> str:
    """What both ends prove the secret for."""
    return f"keeper {run_id}"


class Server:
    """Listens on one address. ``close`` ends it and all connections.

    Raises:
        SkyctlError: the address is not this machine's.
    """

    def __init__(
        self,
        folder: Path,
        *,
        run_id: str,
        secret: str,
        address: str,
        identity: Identity | None = None,
        tell: Callable[[str], None] = tell_stderr,
    ) -> None:
        self._folder, self._identity = folder, identity
        try:
            sock = listening(address)
        except OSError as exc:
            raise SkyctlError(f"the keeper can't listen on {address}: {words(exc)}") from exc
        self._gate = Gate(sock, secret, purpose=purpose(run_id), tell=tell)
        self.address, self.port = address, int(self._gate.port)
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._closed = False
        self._thread = threading.Thread(target=self._admit, daemon=True, name="keeper: admits")
        self._thread.start()

    def close(self) -> None:
        """Idempotent."""
        self._closed = True
        self._gate.close()
        with self._lock:
            for sock in self._open:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(5.0)

    def _admit(self) -> None:
        while not self._closed:
            try:
                sock = self._gate.admit(_ADMIT_S).sock
            except TimeoutError:
                continue
            except (OSError, ValueError):
                return  # closed
            with self._lock:
                full = len(self._open) >= MOST_PEERS or self._closed
                if not full:
                    self._open.add(sock)
            if full:
                sock.close()
            else:
                threading.Thread(target=self._serve, args=(sock,), daemon=True, name="keeper: serves").start()

    def _serve(self, sock: socket.socket) -> None:
        current: socket.socket = sock
        try:
            if self._identity is not None:
                current = self._identity.wrap(sock, server=True, timeout_s=PROOF_S)
                with self._lock:
                    self._open.discard(sock)
                    self._open.add(current)
            current.settimeout(IDLE_S)
            with current.makefile("rwb", buffering=0) as file:
                while not self._closed and (frame := read_frame(file)) is not None:  # type: ignore[arg-type]
                    self._answer(frame[0], file)  # type: ignore[arg-type]
        except (OSError, EOFError, WireError, SkyctlError):
            pass  # the peer is gone, or does not speak as it should: it is let go
        finally:
            with self._lock:
                self._open -= {sock, current}
            current.close()
            sock.close()

    def _answer(self, message: dict[str, Any], out: BinaryIO) -> None:
        """Raises WireError where the question is none."""
        try:
            if message.get("op") == "list":
                newest = layout.natural(message.get("newest", 0))
                also = {layout.natural(step) for step in message.get("steps", [])}
                there = layout.steps(self._folder)
                only = [*(step for step in there[:-newest] if step in also), *there[-newest:]]
                write_frame(out, {"steps": listed(self._folder, only if newest else None)})
            elif message.get("op") == "get":
                step, layer = (layout.natural(message.get(key)) for key in ("step", "layer"))
                send_file(layout.layer_path(self._folder, step, layer), out)
            else:
                raise ValueError(f"unknown op {message.get('op')!r:.40}")
        except (ValueError, TypeError) as exc:
            raise WireError(str(exc)) from exc


def listed(folder: Path, only: list[int] | None = None, *, named: bool = False) -> dict[str, Any]:
    """What is held (``named``: or is to be), as plain JSON values."""
    return {
        str(step): {str(layer): file.to_dict() for layer, file in layers.items()}
        for step, layers in layout.held(folder, only, named=named).items()
    }


def send_file(path: Path, out: BinaryIO) -> None:
    """The file's bytes as they are now: one that is replaced or pruned meanwhile is still sent whole."""
    try:
        file = path.open("rb")
    except OSError as exc:
        write_frame(out, {"missing": f"{path.parent.name}/{path.name}: {words(exc)}"})
        return
    with file:
        left = os.fstat(file.fileno()).st_size
        write_frame(out, {"bytes": left})
        while left:
            chunk = file.read(min(left, CHUNK_BYTES))
            if not chunk:
                raise EOFError(f"{path} was cut while it was read")
            write_frame(out, {}, chunk)
            left -= len(chunk)
