"""Checkpoints copied to this machine while the run goes on (``--keep-here``)."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from skyctl.agent.node_cache import file_digest
from skyctl.checkpoint.launcher.replicator_group import run_folder_on_node
from skyctl.checkpoint.node import layout
from skyctl.checkpoint.node.atomic_file import FileDigest
from skyctl.checkpoint.node.replicator_events import ShardDigest
from skyctl.errors import SkyctlError
from skyctl.files import RunPaths, make_private
from skyctl.remote.agent_session import Session

MIRROR_CLOSE_S = 20.0


@dataclass(frozen=True)
class MirrorRequest:
    """A step to copy; by layer, the session of a node that has it, and the file's SHA-256 and size.

    ``best``: the step with the lowest validation loss, which is not removed here.
    """

    step: int
    attempt: int
    where: Mapping[int, Session]
    shards: Mapping[int, ShardDigest]
    best: int | None = None


class CheckpointMirror:
    """Takes the newest checkpoint that it was told of; those that came while it was busy are passed over."""

    def __init__(self, paths: RunPaths, keep: int, warn: Callable[[str], None]) -> None:
        self._paths, self._keep, self._warn = paths, keep, warn
        self._orders: queue.SimpleQueue[MirrorRequest | None] = queue.SimpleQueue()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="copies checkpoints", daemon=True)
        self._thread.start()

    def take(self, request: MirrorRequest) -> None:
        """Has that step copied, unless a newer one comes first."""
        self._orders.put(request)

    def close(self) -> None:
        """Lets the copy under way come to its end, for a while."""
        self._orders.put(None)
        self._thread.join(MIRROR_CLOSE_S)
        self._over.set()

    def _work(self) -> None:
        ending = False
        while not ending:
            request = self._orders.get()
            while not self._orders.empty():
                later = self._orders.get()
                ending = ending or later is None
                request = later or request
            if request is None:
                return
            try:
                self._copy(request)
            except SkyctlError as exc:
                self._warn(f"the checkpoint of step {request.step} was not copied here: {exc.message}")

    def _copy(self, request: MirrorRequest) -> None:
        folder = make_private(self._paths.checkpoints)
        layout.make_step_folder(folder, request.step)
        for layer, session in request.where.items():
            if self._over.is_set():
                return
            there = run_folder_on_node(session, self._paths.run_id)
            local = layout.layer_path(folder, request.step, layer)
            sha256 = request.shards[layer].sha256
            session.fetch(
                str(layout.layer_path(there, request.step, layer)), local, request.shards[layer].bytes
            )
            local.chmod(0o600)
            if file_digest(local) != sha256:
                local.unlink(missing_ok=True)
                raise SkyctlError(f"{local.name} of step {request.step} was written anew while it was copied")
            file = FileDigest(local.stat().st_size, sha256)
            layout.write_copy_manifest(folder, request.step, layer, file, request.attempt, self._paths.run_id)
        steps = layout.list_steps(folder)
        best = [request.best] if request.best is not None else []
        layout.retain_steps(folder, [*steps[-max(2, self._keep) :], *best])
