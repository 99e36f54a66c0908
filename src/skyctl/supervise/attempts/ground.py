"""What all attempts of a run share: its nodes, their keepers, and which of its checkpoints are kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from skyctl.control.request import Request
from skyctl.control.running import RunOptions
from skyctl.errors import SkyctlError
from skyctl.launch.events import Watcher
from skyctl.records.cluster import Cluster
from skyctl.records.plan import Plan
from skyctl.remote.addresses import peer_address_outcomes
from skyctl.remote.session import Session
from skyctl.supervise.attempts.book import Book
from skyctl.supervise.attempts.copies import Copier, Order
from skyctl.supervise.attempts.keepers import Keepers
from skyctl.supervise.attempts.pins import Pins
from skyctl.supervise.attempts.replanning import nodes_in

REPLICAS = 2
SETTLE_S = 15.0
"""For copies of a last checkpoint, once nothing is computed any more."""
POLL_S = 0.05


@dataclass
class Ground:
    """What all attempts of a run share. ``on_checkpoint``: told the steps done; ``tick``: twice a second."""

    cluster: Cluster
    request: Request
    sessions: dict[str, Session]
    options: RunOptions
    watcher: Watcher
    book: Book
    on_checkpoint: Callable[[int], None]
    tick: Callable[[], None]
    tls: Mapping[str, str] | None = None
    _addresses: dict[str, str] = field(default_factory=dict)
    _keepers: Keepers | None = None
    _copier: Copier | None = None
    _followed: tuple[str, ...] = ()
    _pins: Pins | None = None
    _asked: set[str] = field(default_factory=set)

    @property
    def checkpoints(self) -> bool:
        """Whether the run writes any."""
        return self.options.checkpoint_every != 0

    @property
    def replicas(self) -> int:
        """On how many other nodes each file is to be."""
        return REPLICAS if self.options.replicas is None else self.options.replicas

    @property
    def keepers(self) -> Keepers:
        """The run's keepers; none of them runs before ``with_keepers``."""
        if self._keepers is None:
            self._keepers = Keepers(
                self.book.paths.run_id, self.sessions, self.book.heard, self._of_keeper, self.tls
            )
        return self._keepers

    def addresses(self, needed: tuple[str, ...]) -> dict[str, str]:
        """By node, where its peers reach it; asked again when there are other nodes than before.

        Raises:
            SkyctlError: a node that is needed could not say.
        """
        if set(self._addresses) != set(self.sessions):
            outcomes = peer_address_outcomes(self.sessions)
            for name in needed:
                outcome = outcomes.get(name)
                if isinstance(outcome, SkyctlError):
                    raise outcome
            self._addresses = {n: a for n, a in outcomes.items() if isinstance(a, str)}
        return self._addresses

    def with_keepers(self, needed: tuple[str, ...], *, wait: bool) -> Keepers:
        """Keepers on all nodes there are; ``wait``: until they can be asked."""
        self._asked = set(self.sessions)
        self.keepers.start(self.addresses(needed))
        if wait:
            self.keepers.ready()
        return self.keepers

    def turn(self, plan: Plan) -> None:
        """Takes in what keepers say, and tells them whom to follow once all of them are there."""
        keepers = self._keepers
        if keepers is None:
            return
        keepers.turn()
        nodes = nodes_in(plan)
        if self.checkpoints and set(self.sessions) - self._asked:  # a spare one has come
            with suppress(SkyctlError):
                self.with_keepers((), wait=False)
        order = (*nodes, *sorted(name for name in keepers.nodes if name not in nodes))
        there = tuple(name for name in order if name in keepers.nodes)
        if not keepers.starting and there != self._followed and self.checkpoints:
            self._followed = there
            keepers.follow(there, self.replicas, max(2, self.options.keep))
            pins = self.pins(plan)
            pins.alone = not self.replicas or len(there) < 2
            pins.before = keepers.pinned
            if pins.whole is not None or pins.copying is not None:  # else nodes go by what they had
                keepers.pin(pins.steps)

    def pins(self, plan: Plan) -> Pins:
        """Which checkpoints are kept on every node."""
        if self._pins is None:
            self._pins = Pins(len(plan.problem.layers))
        return self._pins

    def written(self, step: int, plan: Plan) -> None:
        """Every rank has written its layers after so many steps."""
        self.pins(plan).written(step)
        self.keepers.pin(self.pins(plan).steps)

    def goes_on(self, step: int | None, plan: Plan) -> None:
        """An attempt is about to go on from that checkpoint."""
        self.pins(plan).restarted(step)
        self.keepers.pin(self.pins(plan).steps)

    def copy_here(self, step: int, where: Mapping[int, str], layers: Mapping[int, Mapping[str, Any]]) -> None:
        """Copies a checkpoint to this machine, in the background (``--keep-here``)."""
        if self._copier is None:
            self._copier = Copier(self.book.paths, self.options.keep, self.watcher.warn)
        sources = {layer: self.sessions[node] for layer, node in where.items()}
        sha256s = {layer: str(layers[layer]["sha256"]) for layer in where}
        self._copier.take(Order(step, self.book.paths.attempt, sources, sha256s))

    def drop(self, name: str) -> None:
        """That node is lost."""
        self._addresses.pop(name, None)
        self._asked.discard(name)
        if self._keepers is not None:
            self._keepers.drop(name)

    def settle(self, step: int, limit_s: float = SETTLE_S) -> None:
        """Waits until other nodes have copies of the run's last checkpoint, where they are to have any."""
        keepers, pins = self._keepers, self._pins
        if keepers is None or pins is None or pins.alone or pins.newest != step:
            return
        self.watcher.phase("copying the last checkpoint to other nodes; Ctrl-C ends that")
        deadline = time.monotonic() + limit_s
        while pins.whole != step and keepers.nodes and time.monotonic() < deadline:
            keepers.turn()
            time.sleep(POLL_S)
        if pins.whole != step:
            self.watcher.warn(f"the checkpoint of step {step} is not on other nodes: copying took too long")

    def close(self) -> None:
        """Keepers end; what they hold stays."""
        if self._copier is not None:
            self._copier.close()
        if self._keepers is not None:
            self._keepers.close()

    def _of_keeper(self, node: str, event: Mapping[str, Any]) -> None:
        pins = self._pins
        known = pins.steps if pins is not None else []
        if event.get("event") == "replicated" and pins is not None:
            if event.get("attempt") == self.book.paths.attempt:
                pins.copied(int(event["step"]), [int(layer) for layer in event["layers"]])
        elif event.get("event") == "unreplicated":
            if pins is not None:
                pins.failed()
            self.watcher.warn(
                f"checkpoints of {event.get('from')} are not copied to {node}: {event['error']}"
            )
        elif event.get("event") == "ended":
            self.watcher.warn(f"node {node} keeps no checkpoints any more: {event['error']}")
        if pins is not None and pins.steps != known:
            self.keepers.pin(pins.steps)
