"""Copies shards from other nodes' replicators: verified, whole or not at all; once, or as they appear."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from skyctl.agent.frames import FrameError, read_frame, write_frame
from skyctl.agent.task_events import to_message
from skyctl.checkpoint.node import layout
from skyctl.checkpoint.node.atomic_file import FileDigest, atomic_writer
from skyctl.checkpoint.node.layout import HeldShard
from skyctl.checkpoint.node.replicator_events import LayersReplicated, ReplicationFailed, ShardDigest
from skyctl.checkpoint.node.shard_server import HANDSHAKE_TIMEOUT_S, handshake_purpose
from skyctl.errors import RecordError, SkyctlError
from skyctl.transport.handshake import connect_authenticated, os_error_reason
from skyctl.transport.tls_identity import TlsIdentity

POLL_S = 2.0
"""Between two looks at a node that is followed."""
FIRST_RETRY_S, LAST_RETRY_S = 1.0, 30.0
CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 60.0
"""For the next bytes of an answer to arrive."""


class ReplicatorUnreachableError(SkyctlError):
    """The other replicator can't be reached, is gone, or broke the protocol."""


class ShardMissingError(SkyctlError):
    """The other replicator does not have that shard, or no longer has it."""


@dataclass(frozen=True)
class ReplicatorAddress:
    """Where a replicator listens, and of which node it is: that one, and no other, is connected to."""

    host: str
    port: int
    node: str

    def __str__(self) -> str:
        """The replicator as errors name it."""
        return f"the checkpoint replicator of {self.node} ({self.host}:{self.port})"


@dataclass(frozen=True)
class ReplicatorCredentials:
    """What all replicators of one run share: its id, its secret, and its TLS identity (None: no TLS)."""

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
        By layer, the shards that were copied, and why others were not. Where this node's disk was the reason,
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


def _was_removed(error: SkyctlError) -> bool:
    """Whether the step was removed here or there meanwhile, as what a run does not go on from is."""
    return isinstance(error, ShardMissingError) or isinstance(error.__cause__, FileNotFoundError)


class ShardFollower:
    """Copies whatever the ranks of another node write, in a thread of its own.

    Shards of pinned steps come first, so that a step becomes complete however slow the network is, then those
    of the newest step; steps that were superseded meanwhile are skipped. A node that can't be reached is
    tried again, at growing intervals, until ``close``.

    Args:
        limits: by layer of the model, the most bytes that its shard can have.
        slots: held while shards are copied, which limits how many followers copy at once.
        send: sends an event to the launcher for each step that was copied, and one when the node is lost or
            the disk is full.
    """

    def __init__(
        self,
        folder: Path,
        address: ReplicatorAddress,
        credentials: ReplicatorCredentials,
        *,
        keep: int,
        limits: Mapping[int, int],
        slots: threading.Semaphore,
        send: Callable[[dict[str, Any]], None],
        poll_s: float = POLL_S,
    ) -> None:
        self._folder, self._address, self._credentials = folder, address, credentials
        self._keep, self._slots, self._send_event, self._poll_s = keep, slots, send, poll_s
        self._limits = limits
        self._closed = threading.Event()
        self._client: ShardClient | None = None
        self._last_error = ""
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"follows {address.node}")
        self._thread.start()

    def close(self) -> None:
        """Stops following; a half-copied shard is not kept. Idempotent."""
        self._closed.set()
        if (client := self._client) is not None:
            client.close()
        self._thread.join(5.0)

    def _run(self) -> None:
        retry_s = FIRST_RETRY_S
        while not self._closed.is_set():
            try:
                with ShardClient(self._address, self._credentials) as client:
                    self._client = client
                    while not self._closed.is_set() and not client.closed:
                        copied = self._copy_next_step(client)
                        if not client.closed:  # else this disk is full: tried again at growing intervals
                            retry_s = FIRST_RETRY_S
                        if not copied:
                            self._closed.wait(self._poll_s)
            except SkyctlError as exc:
                self._report_error(exc.message)
            finally:
                self._client = None
            self._closed.wait(retry_s)
            retry_s = min(2 * retry_s, LAST_RETRY_S)

    def _copy_next_step(self, client: ShardClient) -> bool:
        """Copies the new shards of one of the node's steps; returns whether there were any."""
        pinned = layout.pinned_steps(self._folder)
        listed = client.list(newest=1, steps=pinned)
        for step, shards in sorted(listed.items(), key=lambda entry: (entry[0] not in pinned, entry[0])):
            wanted = self._wanted(step, shards)
            if not wanted:
                continue
            attempt = max(attempt for _, attempt in wanted.values())
            if step not in pinned and self._superseded(step, attempt):
                continue
            began = time.perf_counter()
            with self._slots:
                run_id, ended = self._credentials.run_id, self._closed.is_set
                copied, failed = fetch_shards(client, self._folder, step, wanted, self._limits, run_id, ended)
            if copied:
                layout.prune_steps(self._folder, self._keep)
                self._send_replicated(step, attempt, copied, time.perf_counter() - began)
            if told := [error for error in failed.values() if not _was_removed(error)]:
                self._report_error(told[0].message)
            if copied or client.closed:  # closed: this disk failed, so the other is asked for no more
                return bool(copied)
        return False

    def _wanted(self, step: int, shards: Mapping[int, HeldShard]) -> dict[int, tuple[str, int]]:
        """By layer, (SHA-256, attempt) of shards by the node's own ranks that are missing or older here."""
        here = layout.held_shards(self._folder, [step]).get(step, {})
        return {
            layer: (shard.sha256, shard.attempt)
            for layer, shard in shards.items()
            if shard.own
            and (
                layer not in here
                or (here[layer].sha256 != shard.sha256 and here[layer].attempt <= shard.attempt)
            )
        }

    def _superseded(self, step: int, attempt: int) -> bool:
        """Whether that step would be pruned at once: newer ones, of no earlier attempt, are here already."""
        newer = [
            other
            for other in layout.list_steps(self._folder)
            if other > step
            and any(manifest.attempt >= attempt for _, manifest in layout.read_manifests(self._folder, other))
        ]
        return bool(self._keep) and len(newer) >= max(2, self._keep)

    def _send_replicated(
        self, step: int, attempt: int, copied: Mapping[int, FileDigest], wall_s: float
    ) -> None:
        event = LayersReplicated(
            step=step,
            attempt=attempt,
            source=self._address.node,
            layers={n: ShardDigest(file.sha256, file.size_bytes) for n, file in copied.items()},
            bytes=sum(file.size_bytes for file in copied.values()),
            wall_s=wall_s,
        )
        self._send(to_message(event))

    def _report_error(self, error: str) -> None:
        """Sends an error to the launcher, unless it is the same as the last one."""
        if not self._closed.is_set() and error != self._last_error:
            self._last_error = error
            self._send(to_message(ReplicationFailed(self._address.node, error)))

    def _send(self, event: dict[str, Any]) -> None:
        try:
            self._send_event(event)
        except EOFError:  # the node agent is gone, and this process is about to be
            self._closed.set()
