"""Serves a node's shards to the replicators of other nodes, over authenticated connections.

The protocol, in the agents' frames (``agent.frames``), one request after the other::

    → {"op": "list", "newest": K, "steps": [STEP]}      the newest K and those; K 0: all
    ← {"steps": {STEP: {LAYER: {"sha256", "bytes", "attempt", "own"}}}}
    → {"op": "get", "step": STEP, "layer": LAYER}
    ← {"bytes": N}, then frames whose bodies are the file's N bytes; or {"missing": "…"}, {"unreadable": "…"}

A file is named by numbers, never by a path. The client checks what it receives against the SHA-256 of a
manifest.
"""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from skyctl.agent.frames import CHUNK_BYTES, FrameError, read_frame, write_frame
from skyctl.checkpoint.node import layout
from skyctl.errors import SkyctlError
from skyctl.transport.handshake import (
    AuthenticatedSocket,
    AuthenticatingListener,
    open_listener,
    os_error_reason,
)
from skyctl.transport.tls_identity import TlsIdentity

MAX_CONNECTIONS = 64
"""Authenticated connections at a time."""
IDLE_TIMEOUT_S = 120.0
"""A client that neither asks nor reads for so long is disconnected; it connects again when it needs to."""
HANDSHAKE_TIMEOUT_S = 10.0
_ACCEPT_TIMEOUT_S = 3600.0


def handshake_purpose(run_id: str, node: str) -> str:
    """The purpose that both ends prove (``transport.handshake``): the run, and the node that serves."""
    return f"checkpoint replicator {run_id} of {node}"


class ShardServer:
    """Listens on one address and answers clients in threads, until ``close``.

    Raises:
        SkyctlError: the address is not this machine's.
    """

    def __init__(
        self,
        folder: Path,
        *,
        run_id: str,
        node: str,
        secret: str,
        address: str,
        identity: TlsIdentity | None = None,
    ) -> None:
        self._folder, self._identity = folder, identity
        try:
            sock = open_listener(address)
        except OSError as exc:
            raise SkyctlError(
                f"the checkpoint replicator can't listen on {address}: {os_error_reason(exc)}"
            ) from exc
        self._gate = AuthenticatingListener(sock, secret, purpose=handshake_purpose(run_id, node))
        self.address, self.port = address, int(self._gate.port)
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._closed = False
        self._thread = threading.Thread(target=self._admit, daemon=True, name="shard server: accepts")
        self._thread.start()

    def close(self) -> None:
        """Stops listening and closes every connection. Idempotent."""
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
                admitted = self._gate.accept(_ACCEPT_TIMEOUT_S)
            except TimeoutError:
                continue
            except (OSError, ValueError):
                return  # the listener was closed
            with self._lock:
                full = len(self._open) >= MAX_CONNECTIONS or self._closed
                if not full:
                    self._open.add(admitted.sock)
            if full:
                admitted.sock.close()
            else:
                threading.Thread(
                    target=self._serve, args=(admitted,), daemon=True, name="shard server: serves"
                ).start()

    def _serve(self, admitted: AuthenticatedSocket) -> None:
        sock = admitted.sock
        current: socket.socket = sock
        try:
            if self._identity is not None:
                current = self._identity.wrap(admitted, server=True, timeout_s=HANDSHAKE_TIMEOUT_S)
                with self._lock:
                    self._open.discard(sock)
                    self._open.add(current)
            current.settimeout(IDLE_TIMEOUT_S)
            with current.makefile("rwb", buffering=0) as file:
                while not self._closed and (frame := read_frame(file)) is not None:  # type: ignore[arg-type]
                    self._answer(frame[0], file)  # type: ignore[arg-type]
        except (OSError, EOFError, FrameError, SkyctlError):
            pass  # the client is gone, or broke the protocol: it is disconnected
        finally:
            with self._lock:
                self._open -= {sock, current}
            current.close()
            sock.close()

    def _answer(self, message: dict[str, Any], out: BinaryIO) -> None:
        """Answers one request; FrameError where it is invalid."""
        try:
            if message.get("op") == "list":
                newest = layout.parse_natural(message.get("newest", 0))
                also = {layout.parse_natural(step) for step in message.get("steps", [])}
                there = layout.list_steps(self._folder)
                only = [*(step for step in there[:-newest] if step in also), *there[-newest:]]
                write_frame(out, {"steps": list_holdings(self._folder, only if newest else None)})
            elif message.get("op") == "get":
                step, layer = (layout.parse_natural(message.get(key)) for key in ("step", "layer"))
                send_file(layout.layer_path(self._folder, step, layer), out)
            else:
                raise ValueError(f"unknown op {message.get('op')!r:.40}")
        except (ValueError, TypeError) as exc:
            raise FrameError(str(exc)) from exc


def list_holdings(folder: Path, only: list[int] | None = None, *, named: bool = False) -> dict[str, Any]:
    """The shards that a folder holds, by step and layer, as JSON values.

    Args:
        only: steps to list; None: all.
        named: also list shards that manifests name but that are missing or damaged.
    """
    return {
        str(step): {str(layer): file.to_dict() for layer, file in layers.items()}
        for step, layers in layout.held_shards(folder, only, named=named).items()
    }


def send_file(path: Path, out: BinaryIO) -> None:
    """Sends the file as it is now: one that is replaced or pruned meanwhile is still sent whole."""
    try:
        file = path.open("rb")
    except OSError as exc:
        kind = "missing" if isinstance(exc, FileNotFoundError) else "unreadable"
        write_frame(out, {kind: f"{path.parent.name}/{path.name}: {os_error_reason(exc)}"})
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
