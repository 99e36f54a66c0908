"""The nodes of a script while it runs: who is not heard, and who is lost.

**Unreachable is not dead.** A node that this machine does not hear may train on with its peers, so those are
asked before it is lost (``peer_links``).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from skyctl.errors import NodeError, SkyctlError
from skyctl.remote.agent_session import Session
from skyctl.run.callbacks import RunCallbacks
from skyctl.run.scripts.peer_links import PeerLinks

WARN_S = 8.0
"""A node that is not heard for so long is named."""
NODE_TIMEOUT_S = 10.0
"""One that is not heard for so long, and that no other node reaches either, is lost."""
MISSED_S = 6.0
"""An agent answers every five seconds (``remote.agent_connection``): a node that did not may be going."""


class NodeWatch:
    """Names nodes that are not heard, and tells which are lost.

    Args:
        sessions: by node; shared with the run, which takes lost nodes out.

    Attributes:
        links: asks nodes for each other; None: none can be asked, and a node that is not heard is waited for.
    """

    def __init__(self, sessions: Mapping[str, Session], callbacks: RunCallbacks) -> None:
        self._sessions, self._callbacks = sessions, callbacks
        self.links: PeerLinks | None = None
        self._silent: set[str] = set()
        self._asked_at: dict[str, float] = {}

    def look(self, nodes: Iterable[str]) -> None:
        """Names those of the nodes that are not heard, or are again.

        Raises:
            NodeError: one is lost.
        """
        nodes = list(nodes)
        for node in nodes:
            quiet_s = self._quiet_s(node)
            if quiet_s < WARN_S:
                if node in self._silent:
                    self._silent.discard(node)
                    if self.links is not None:
                        self.links.forget(node)
                    self._callbacks.note(f"node {node} is heard again")
                continue
            if node not in self._silent:
                self._silent.add(node)
                self._callbacks.warn(f"node {node} has not been heard for {quiet_s:.0f} s")
            if quiet_s >= NODE_TIMEOUT_S and self._is_unreached(node, nodes):
                raise _lost_error(node, f"has not been heard for {quiet_s:.0f} s, nor do others reach it")

    def lost_nodes(self, error: SkyctlError, nodes: Iterable[str]) -> list[str]:
        """The nodes that are gone: the one that the error names, and then all that are not heard either."""
        nodes = list(nodes)
        if not isinstance(error, NodeError) or error.node not in nodes:
            return []
        return [
            node
            for node in nodes
            if node == error.node
            or self._sessions[node].lost is not None
            or self._quiet_s(node) >= NODE_TIMEOUT_S
        ]

    def cause_of(self, error: SkyctlError, nodes: Iterable[str]) -> SkyctlError:
        """Ranks fail when a peer's node goes: where one is not heard any more, that is the cause.

        It waits up to ``NODE_TIMEOUT_S`` for a node that may be going.
        """
        if isinstance(error, NodeError):
            return error
        deadline = time.monotonic() + NODE_TIMEOUT_S
        nodes = list(nodes)
        while suspects := [node for node in nodes if self._quiet_s(node) >= MISSED_S]:
            for node in suspects:
                if self._quiet_s(node) >= NODE_TIMEOUT_S:
                    lost = _lost_error(node, f"has not been heard for {self._quiet_s(node):.0f} s")
                    lost.log = error.log
                    return lost
            if time.monotonic() > deadline:
                break
            time.sleep(0.2)
        return error

    def close(self) -> None:
        """Ends the nodes' questions to each other."""
        links, self.links = self.links, None
        if links is not None:
            links.close()

    def _quiet_s(self, node: str) -> float:
        session = self._sessions[node]
        return max(session.silent_s, session.disconnected_s)

    def _is_unreached(self, node: str, nodes: list[str]) -> bool:
        """Whether other nodes have said that they can't reach it; they are asked again every now and then."""
        if self.links is None:
            return False
        answers = self.links.answers(node)
        if answers:
            return False in answers and True not in answers
        now = time.monotonic()
        if now - self._asked_at.get(node, -NODE_TIMEOUT_S) >= NODE_TIMEOUT_S:
            self._asked_at[node] = now
            others = [other for other in nodes if other != node and self._quiet_s(other) < MISSED_S]
            self.links.ask(others, node)
        return False


def _lost_error(node: str, how: str) -> NodeError:
    return NodeError(
        f"node {node} {how}", node=node, hint=f"see whether it is up: skyctl check --limit {node}"
    )
