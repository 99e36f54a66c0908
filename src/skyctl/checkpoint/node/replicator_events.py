"""The events that a checkpoint replicator reports to the launcher: one frozen record for each kind of event.

``agent.task_events`` reads them. Needs the standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from skyctl.agent.message_fields import (
    Address,
    ByteCount,
    Index,
    Label,
    MaxLength,
    Port,
    Seconds,
    Sha256,
    Within,
)

MOST_PINNED = 1000


@dataclass(frozen=True)
class ReplicatorListening:
    """The address where other nodes' replicators reach it; ``pinned``: steps pinned when it began."""

    kind: ClassVar[str] = "listening"
    address: Address
    port: Port
    pinned: Annotated[tuple[Index, ...], MaxLength(MOST_PINNED)] = ()


@dataclass(frozen=True)
class ListedShard:
    """One layer's file as a replicator lists it: ``layout.HeldShard.to_dict``."""

    sha256: Sha256
    bytes: ByteCount
    attempt: Index = 0
    own: bool = True


@dataclass(frozen=True)
class ShardDigest:
    """One layer's file of a checkpoint, written or copied."""

    sha256: Sha256
    bytes: ByteCount


@dataclass(frozen=True)
class ReplicatorAnswer:
    """The answer to the launcher's order of that ``id``; ``error``: why it could not be done.

    ``steps``: what it holds, by step and layer. ``damaged``, and ``failed`` to arrive: by layer, why.
    ``unwritable``: why this node itself can't keep a file (its disk is full, say), wherever it comes from.
    """

    kind: ClassVar[str] = "answer"
    id: Annotated[int, Within(1, 2**53)] | None = None
    error: str | None = None
    steps: Mapping[int, Mapping[int, ListedShard]] | None = None
    damaged: Mapping[int, str] | None = None
    failed: Mapping[int, str] | None = None
    unwritable: str | None = None


@dataclass(frozen=True)
class LayersReplicated:
    """It has copied these layers of a step from the node ``source``; ``wall_s``: how long that took."""

    kind: ClassVar[str] = "replicated"
    keys: ClassVar[Mapping[str, str]] = {"source": "from"}
    step: Index
    attempt: Index
    source: Label
    layers: Mapping[int, ShardDigest]
    bytes: ByteCount
    wall_s: Seconds


@dataclass(frozen=True)
class ReplicationFailed:
    """It could not copy from the node ``source``, and goes on trying."""

    kind: ClassVar[str] = "unreplicated"
    keys: ClassVar[Mapping[str, str]] = {"source": "from"}
    source: Label
    error: str
