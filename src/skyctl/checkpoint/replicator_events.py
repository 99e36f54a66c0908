"""What a checkpoint replicator tells the launcher: one frozen record for each kind of event.

``agent.task_events`` reads them. Needs the standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class ReplicatorListening:
    """The address where other nodes' replicators reach it; ``pinned``: steps pinned when it began."""

    kind: ClassVar[str] = "listening"
    address: str
    port: int
    pinned: tuple[int, ...] = ()


@dataclass(frozen=True)
class ReplicatorAnswer:
    """The answer to the launcher's order of that ``id``; ``error``: why it could not be done.

    ``steps``: what it holds, by step and layer, as ``layout.HeldShard.from_dict`` reads it. ``damaged``, and
    ``failed`` to arrive: by layer, why.
    """

    kind: ClassVar[str] = "answer"
    id: int | None = None
    error: str | None = None
    steps: Mapping[int, Mapping[int, Any]] | None = None
    damaged: Mapping[int, str] | None = None
    failed: Mapping[int, str] | None = None


@dataclass(frozen=True)
class LayersReplicated:
    """It has copied these layers of a step from the node ``source``; ``wall_s``: how long that took."""

    kind: ClassVar[str] = "replicated"
    keys: ClassVar[Mapping[str, str]] = {"source": "from"}
    step: int
    attempt: int
    source: str
    layers: Mapping[int, Any]
    bytes: int
    wall_s: float


@dataclass(frozen=True)
class ReplicationFailed:
    """It could not copy from the node ``source``, and goes on trying."""

    kind: ClassVar[str] = "unreplicated"
    keys: ClassVar[Mapping[str, str]] = {"source": "from"}
    source: str
    error: str


@dataclass(frozen=True)
class ReplicatorEnded:
    """A node has no replicator any more, and why; the launcher finds that out, no node tells it."""

    error: str


ReplicatorNews = LayersReplicated | ReplicationFailed | ReplicatorEnded
"""What the launcher acts on beside answers."""
