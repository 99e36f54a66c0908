"""Copies the shards that another node writes, as they appear."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from skyctl.agent.task_events import to_message
from skyctl.checkpoint.node import layout
from skyctl.checkpoint.node.atomic_file import FileDigest
from skyctl.checkpoint.node.layout import HeldShard
from skyctl.checkpoint.node.replicator_events import LayersReplicated, ReplicationFailed, ShardDigest
from skyctl.checkpoint.node.shard_client import (
    ReplicatorAddress,
    ReplicatorCredentials,
    ShardClient,
    ShardMissingError,
    fetch_shards,
)
from skyctl.errors import SkyctlError

POLL_S = 2.0
"""Between two looks at a node that is followed."""
FIRST_RETRY_S, LAST_RETRY_S = 1.0, 30.0


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
