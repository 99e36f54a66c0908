"""A standing order: whatever another node's ranks write is taken here too, as long as anybody trains."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from skyctl.checkpoint import layout
from skyctl.checkpoint.fetching import Address, Credentials, Peer, take
from skyctl.errors import SkyctlError

POLL_S = 2.0
FIRST_RETRY_S, LAST_RETRY_S = 1.0, 30.0


class Follower:
    """Takes one peer's layers in a thread of its own.

    Those of pinned steps first, so that a step becomes whole however slow the way is, then of the newest;
    others that were superseded meanwhile are skipped. A peer that can't be reached is tried again, more and
    more rarely, until ``close``.

    Args:
        room: held while files are taken, so that not all followers do at once.
        tell: gets an event for each step that was taken, and one when the peer is lost or the disk is full.
    """

    def __init__(
        self,
        folder: Path,
        address: Address,
        credentials: Credentials,
        *,
        keep: int,
        room: threading.Semaphore,
        tell: Callable[[dict[str, Any]], None],
        poll_s: float = POLL_S,
    ) -> None:
        self._folder, self._address, self._credentials = folder, address, credentials
        self._keep, self._room, self._tell, self._poll_s = keep, room, tell, poll_s
        self._over = threading.Event()
        self._peer: Peer | None = None
        self._told = ""
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"follows {address.node}")
        self._thread.start()

    def close(self) -> None:
        """Ends it; what is half taken is not kept. Idempotent."""
        self._over.set()
        if (peer := self._peer) is not None:
            peer.close()
        self._thread.join(5.0)

    def _run(self) -> None:
        retry_s = FIRST_RETRY_S
        while not self._over.is_set():
            try:
                with Peer(self._address, self._credentials) as peer:
                    self._peer = peer
                    while not self._over.is_set() and not peer.closed:
                        busy = self._turn(peer)
                        if not peer.closed:  # else this disk is full: tried again, more and more rarely
                            retry_s = FIRST_RETRY_S
                        if not busy:
                            self._over.wait(self._poll_s)
            except SkyctlError as exc:
                self._complain(exc.message)
            finally:
                self._peer = None
            self._over.wait(retry_s)
            retry_s = min(2 * retry_s, LAST_RETRY_S)

    def _turn(self, peer: Peer) -> bool:
        """Takes what is new of one of the peer's steps; whether there was anything."""
        pinned = layout.pinned(self._folder)
        theirs = peer.list(newest=1, steps=pinned)
        for step, layers in sorted(theirs.items(), key=lambda entry: (entry[0] not in pinned, entry[0])):
            own = {layer: file for layer, file in layers.items() if file.own}
            here = layout.held(self._folder, [step]).get(step, {})
            wanted = {
                layer: (file.sha256, file.attempt)
                for layer, file in own.items()
                if layer not in here
                or (here[layer].sha256 != file.sha256 and here[layer].attempt <= file.attempt)
            }
            if not wanted:
                continue
            if step not in pinned and self._superseded(step, max(attempt for _, attempt in wanted.values())):
                continue
            began = time.perf_counter()
            with self._room:
                taken, failed = take(
                    peer, self._folder, step, wanted, self._credentials.run_id, self._over.is_set
                )
            if taken:
                layout.prune(self._folder, self._keep)
                self._say(
                    {
                        "event": "replicated",
                        "step": step,
                        "attempt": max(attempt for _, attempt in wanted.values()),
                        "from": self._address.node,
                        "layers": {
                            str(n): {"sha256": f.sha256, "bytes": f.size_bytes} for n, f in taken.items()
                        },
                        "bytes": sum(file.size_bytes for file in taken.values()),
                        "wall_s": time.perf_counter() - began,
                    }
                )
            if failed:
                self._complain(next(iter(failed.values())))
            if taken:
                return True
        return False

    def _superseded(self, step: int, attempt: int) -> bool:
        """Whether that step would be pruned at once: newer ones, of no earlier attempt, are here already."""
        newer = [
            other
            for other in layout.steps(self._folder)
            if other > step
            and any(part.attempt >= attempt for _, part in layout.manifests(self._folder, other))
        ]
        return bool(self._keep) and len(newer) >= max(2, self._keep)

    def _complain(self, why: str) -> None:
        """Once for each reason."""
        if not self._over.is_set() and why != self._told:
            self._told = why
            self._say({"event": "unreplicated", "from": self._address.node, "error": why})

    def _say(self, event: dict[str, Any]) -> None:
        try:
            self._tell(event)
        except EOFError:  # the node agent is gone, and this process is about to be
            self._over.set()
