"""Checkpoints copied to this machine while the run goes on (``--keep-here``)."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from skyctl.agent.node_cache import file_digest
from skyctl.checkpoint import layout
from skyctl.checkpoint.atomic_file import FileDigest
from skyctl.errors import SkyctlError
from skyctl.files import RunPaths, make_private
from skyctl.remote.agent_session import Session
from skyctl.run.checkpoints.replicator_group import run_folder_on_node

MIRROR_CLOSE_S = 20.0


@dataclass(frozen=True)
class MirrorOrder:
    """A step to copy; by layer, the session of a node that has it, and the file's SHA-256."""

    step: int
    attempt: int
    where: Mapping[int, Session]
    sha256s: Mapping[int, str]


class CheckpointMirror:
    """Takes the newest checkpoint that it was told of; those that came while it was busy are passed over."""

    def __init__(self, paths: RunPaths, keep: int, warn: Callable[[str], None]) -> None:
        self._paths, self._keep, self._warn = paths, keep, warn
        self._orders: queue.SimpleQueue[MirrorOrder | None] = queue.SimpleQueue()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="copies checkpoints", daemon=True)
        self._thread.start()

    def take(self, order: MirrorOrder) -> None:
        """Has that step copied, unless a newer one comes first."""
        self._orders.put(order)

    def close(self) -> None:
        """Lets the copy under way come to its end, for a while."""
        self._orders.put(None)
        self._thread.join(MIRROR_CLOSE_S)
        self._over.set()

    def _work(self) -> None:
        ending = False
        while not ending:
            order = self._orders.get()
            while not self._orders.empty():
                later = self._orders.get()
                ending = ending or later is None
                order = later or order
            if order is None:
                return
            try:
                self._copy(order)
            except SkyctlError as exc:
                self._warn(f"the checkpoint of step {order.step} was not copied here: {exc.message}")

    def _copy(self, order: MirrorOrder) -> None:
        folder = make_private(self._paths.checkpoints)
        layout.make_step_folder(folder, order.step)
        for layer, session in order.where.items():
            if self._over.is_set():
                return
            there = run_folder_on_node(session, self._paths.run_id)
            local = layout.layer_path(folder, order.step, layer)
            session.fetch(str(layout.layer_path(there, order.step, layer)), local)
            local.chmod(0o600)
            sha256 = order.sha256s[layer]
            if file_digest(local) != sha256:
                local.unlink(missing_ok=True)
                raise SkyctlError(f"{local.name} of step {order.step} was written anew while it was copied")
            file = FileDigest(local.stat().st_size, sha256)
            layout.write_copy_manifest(folder, order.step, layer, file, order.attempt, self._paths.run_id)
        layout.retain_steps(folder, layout.list_steps(folder)[-max(2, self._keep) :])
