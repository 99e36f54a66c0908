"""Messages of a node's checkpoint replicator, and requests to it; refuses answers that none would give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from skyctl.agent.task_events import DoneEvent, LogEvent
from skyctl.checkpoint.node.recovery import RestorePoint, ShardTransfer
from skyctl.checkpoint.node.replicator_events import (
    LayersReplicated,
    ReplicationFailed,
    ReplicatorAnswer,
    ReplicatorListening,
)
from skyctl.checkpoint.node.replicator_requests import PullRequest
from skyctl.errors import ProtocolError, SkyctlError

_EVENTS = (ReplicatorListening, ReplicatorAnswer, LayersReplicated, ReplicationFailed, LogEvent, DoneEvent)
REPLICATOR_KINDS: Mapping[str, type] = {cls.kind: cls for cls in _EVENTS}
"""By ``event``, the records of what replicators send."""


@dataclass(frozen=True)
class ReplicatorEnded:
    """A node's replicator has ended, or did not start: ``error`` says why. It copies nothing any more."""

    error: SkyctlError


ReplicatorNews = LayersReplicated | ReplicationFailed | ReplicatorEnded


class ReplicatorRequests:
    """Requests by number, to whom each was made, and the answers that somebody waits for.

    Args:
        limits: by layer, the most bytes that its file can have.
    """

    def __init__(self, limits: Mapping[int, int]) -> None:
        self.limits = limits
        self._number = 0
        self._given: dict[int, str] = {}
        self.asked: dict[int, str] = {}
        self.answers: dict[int, ReplicatorAnswer | SkyctlError] = {}

    def next_number(self) -> int:
        """The number of the next request."""
        self._number += 1
        return self._number

    def give(self, number: int, node: str) -> None:
        """That request was sent to that node's replicator; its answer is waited for."""
        self.asked[number] = self._given[number] = node

    def pull(
        self,
        point: RestorePoint,
        address: ReplicatorListening,
        source: str,
        needs: Sequence[ShardTransfer],
    ) -> PullRequest:
        """The request to fetch those files from the replicator of the node ``source``."""
        return PullRequest(
            host=address.address,
            port=address.port,
            node=source,
            step=point.step,
            attempt=point.attempt,
            layers={need.layer: need.sha256 for need in needs},
            limits=self.limits,
        )

    def take(self, node: str, event: ReplicatorAnswer) -> None:
        """An answer has come.

        Raises:
            ProtocolError: the node was made no such request, or has answered before, or lists files that no
                layer of the model has.
        """
        if event.id is None:
            return
        if self._given.get(event.id) != node:
            raise ProtocolError(f"node {node} answered request {event.id}, which it was not made", node=node)
        del self._given[event.id]
        for step, layers in (event.steps or {}).items():
            for layer, shard in layers.items():
                limit = self.limits.get(layer, -1)
                if shard.bytes > limit:
                    allowed = f"{limit} are the most" if limit >= 0 else "there is no such layer"
                    raise ProtocolError(
                        f"node {node} lists a file of {shard.bytes} bytes for layer {layer} of step {step}; "
                        f"{allowed}",
                        node=node,
                    )
        if event.id in self.asked:  # else it came too late
            self.answers[event.id] = SkyctlError(event.error) if event.error else event
