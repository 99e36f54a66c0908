"""Copies shards from other nodes' replicators: verified, whole or not at all."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from skyctl.agent.frames import FrameError, read_frame, write_frame
from skyctl.checkpoint.node import layout
from skyctl.checkpoint.node.atomic_file import FileDigest, atomic_writer
from skyctl.checkpoint.node.layout import HeldShard
from skyctl.checkpoint.node.shard_server import HANDSHAKE_TIMEOUT_S, handshake_purpose
from skyctl.errors import RecordError, SkyctlError
from skyctl.transport.handshake import connect_authenticated, os_error_reason
from skyctl.transport.tls_identity import TlsIdentity

CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 60.0
"""For the next bytes of an answer to arrive."""


class ReplicatorUnreachableError(SkyctlError):
    """The other replicator can't be reached, is gone, or broke the protocol."""


class ShardMissingError(SkyctlError):
    """The other replicator does not have that shard, or no longer has it."""


@dataclass(frozen=True)
class ReplicatorAddress:
    """The address at which a replicator listens, and its node: clients connect to that one, and no other."""

    host: str
    port: int
    node: str

    def __str__(self) -> str:
        """The replicator as errors name it."""
        return f"the checkpoint replicator of {self.node} ({self.host}:{self.port})"


@dataclass(frozen=True)
class ReplicatorCredentials:
    """The credentials of the replicators of one run: its id, its secret, its TLS identity (None: no TLS)."""

    run_id: str
    secret: str
    identity: TlsIdentity | None = None


class ShardClient:
    """A connection to another node's ``ShardServer``; ``with`` closes it.

    Raises:
        ReplicatorUnreachableError: no connection, or what answers there does not know the secret.
    """

    def __init__(
        self,
        address: ReplicatorAddress,
        credentials: ReplicatorCredentials,
    ) -> None:
        self._address = address
        self.closed = False
        try:
            admitted = connect_authenticated(
                address.host,
                address.port,
                credentials.secret,
                purpose=handshake_purpose(credentials.run_id, address.node),
                timeout_s=CONNECT_TIMEOUT_S,
            )
            self._sock: socket.socket = admitted.sock
            try:
                if credentials.identity is not None:
                    self._sock = credentials.identity.wrap(
                        admitted, server=False, timeout_s=HANDSHAKE_TIMEOUT_S
                    )
                self._sock.settimeout(ANSWER_TIMEOUT_S)
                self._file = self._sock.makefile("rwb", buffering=0)
            except BaseException:
                self._sock.close()
                raise
        except OSError as exc:
            raise ReplicatorUnreachableError(f"no connection with {address}: {os_error_reason(exc)}") from exc

    def __enter__(self) -> ShardClient:
        """The client itself; it is connected already."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the connection; see ``close``."""
        self.close()

    def close(self) -> None:
        """Closes the connection; wakes what waits for an answer in another thread. Idempotent."""
        self.closed = True
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._file.close()
        self._sock.close()

    def list(self, newest: int = 0, steps: Collection[int] = ()) -> dict[int, dict[int, HeldShard]]:
        """The shards that the other node holds, by step and layer.

        Args:
            newest: of the newest so many steps only, and of ``steps``; 0: of all.

        Raises:
            ReplicatorUnreachableError: it is gone, or gave no valid answer.
        """
        answer, _ = self._ask({"op": "list", "newest": newest, "steps": sorted(steps)})
        try:
            return parse_holdings(answer.get("steps"))
        except ValueError as exc:
            raise ReplicatorUnreachableError(f"{self._address} gave an answer that is none: {exc}") from exc

    def get(self, folder: Path, step: int, layer: int, sha256: str, most_bytes: int) -> FileDigest:
        """Copies one shard into its place in ``folder``, where the step's folder must exist.

        Args:
            most_bytes: how large it can be; of a larger one nothing is taken.

        Raises:
            ShardMissingError: it does not have the shard.
            RecordError: what arrived has another SHA-256; nothing is kept of it.
            ReplicatorUnreachableError: it is gone, or gave no valid answer.
            SkyctlError: the other one can't read it, or the disk here is full or not writable.
        """
        answer, _ = self._ask({"op": "get", "step": step, "layer": layer})
        if "missing" in answer:
            raise ShardMissingError(f"{self._address} does not have {str(answer['missing'])[:200]}")
        if "unreadable" in answer:
            raise SkyctlError(f"{self._address} can't read {str(answer['unreadable'])[:200]}")
        path = layout.layer_path(folder, step, layer)
        try:
            left = layout.parse_natural(answer.get("bytes"), 1 << 62)
        except ValueError as exc:
            raise ReplicatorUnreachableError(f"{self._address} gave an answer that is none: {exc}") from exc
        if left > most_bytes:
            self.close()
            name = f"{path.parent.name}/{path.name}"
            raise ReplicatorUnreachableError(
                f"{self._address} has {left} bytes of {name}, more than {most_bytes}"
            )
        try:
            with atomic_writer(path, 0o600) as out:
                while left:
                    _, chunk = self._frame()
                    if not 0 < len(chunk) <= left:
                        raise ReplicatorUnreachableError(
                            f"{self._address} sent more or less of {path.name} than it said"
                        )
                    out.write(chunk)
                    left -= len(chunk)
                if out.digest.sha256 != sha256:
                    raise RecordError(
                        f"{path.parent.name}/{path.name} of {self._address} is damaged: its SHA-256 is "
                        f"{out.digest.sha256[:12]}…, it must be {sha256[:12]}…"
                    )
        except SkyctlError as exc:
            if not isinstance(exc, ReplicatorUnreachableError | RecordError):
                self.close()  # the rest of the file is still on its way
            raise
        return out.digest

    def _ask(self, question: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        try:
            write_frame(self._file, question)  # type: ignore[arg-type]
        except (OSError, ValueError) as exc:
            raise ReplicatorUnreachableError(f"{self._address} is gone: {exc}") from exc
        return self._frame()

    def _frame(self) -> tuple[dict[str, Any], bytes]:
        try:
            frame = read_frame(self._file)  # type: ignore[arg-type]
        except TimeoutError as exc:
            raise ReplicatorUnreachableError(
                f"{self._address} said nothing for {ANSWER_TIMEOUT_S:.0f} s"
            ) from exc
        except (OSError, EOFError, FrameError, ValueError) as exc:
            raise ReplicatorUnreachableError(f"{self._address} is gone: {exc}") from exc
        if frame is None:
            raise ReplicatorUnreachableError(f"{self._address} is gone: it closed the connection")
        return frame


def parse_holdings(raw: Any) -> dict[int, dict[int, HeldShard]]:
    """The shards in a replicator's answer, by step and layer; ValueError where the answer is malformed."""
    if not isinstance(raw, dict):
        raise ValueError(f"not steps: {raw!r:.80}")
    found: dict[int, dict[int, HeldShard]] = {}
    for step, layers in raw.items():
        if not isinstance(layers, dict):
            raise ValueError(f"not layers: {layers!r:.80}")
        found[layout.parse_index(step)] = {
            layout.parse_index(layer): HeldShard.from_dict(file) for layer, file in layers.items()
        }
    return found


def fetch_shards(
    client: ShardClient,
    folder: Path,
    step: int,
    layers: Mapping[int, tuple[str, int]],
    limits: Mapping[int, int],
    run_id: str,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> tuple[dict[int, FileDigest], dict[int, SkyctlError]]:
    """Copies shards of one step, with a manifest for each; those that are here already are left alone.

    Args:
        layers: by layer, the shard's SHA-256 and attempt.
        limits: by layer of the model, the most bytes that its shard can have.
        is_cancelled: asked between two shards.

    Returns:
        By layer, the shards that were copied, and why others were not. If this node's disk was the reason,
        the client is ``closed`` afterwards.

    Raises:
        ReplicatorUnreachableError: the connection failed; what was copied before is kept.
    """
    copied: dict[int, FileDigest] = {}
    failed: dict[int, SkyctlError] = {}
    here = layout.held_shards(folder, [step]).get(step, {})
    layout.make_step_folder(folder, step)
    for layer, (sha256, attempt) in layers.items():
        if is_cancelled():
            break
        if layer in here and here[layer].sha256 == sha256:
            continue
        try:
            copied[layer] = client.get(folder, step, layer, sha256, limits.get(layer, 0))
            layout.write_copy_manifest(folder, step, layer, copied[layer], attempt, run_id)
        except ReplicatorUnreachableError:
            raise
        except SkyctlError as exc:
            copied.pop(layer, None)
            failed[layer] = exc
        if client.closed:  # it was this disk that failed: the others would fare no better
            why = failed.get(layer, SkyctlError("the connection was closed"))
            rest = list(layers)[list(layers).index(layer) + 1 :]
            failed |= {n: why for n in rest if n not in here or here[n].sha256 != layers[n][0]}
            break
    return copied, failed
